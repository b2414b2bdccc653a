//! Image information as text, in the format of `qemu-img info`.

use crate::calendar;
use crate::options::printable;
use crate::size::human;
use isobath_disk::encryption::Info;
use isobath_disk::{ImageInfo, IndexState, Qcow2Info};
use isobath_formats::VmdkInfo;
use isobath_qcow2::Snapshot;
use std::io::{self, Write};

pub(super) fn print(out: &mut dyn Write, info: &ImageInfo, format: &str) -> io::Result<()> {
    let name = |path: &std::path::Path| printable(&path.display().to_string());
    writeln!(out, "image: {}", name(&info.filename))?;
    writeln!(out, "file format: {format}")?;
    let size = info.virtual_size;
    writeln!(out, "virtual size: {} ({size} bytes)", human(size))?;
    let actual = info.actual_size.map_or_else(|| "unavailable".into(), human);
    writeln!(out, "disk size: {actual}")?;
    if info.luks.is_some() {
        writeln!(out, "encrypted: yes")?;
    }
    if let Some(qcow2) = &info.qcow2 {
        if qcow2.encrypted {
            writeln!(out, "encrypted: yes")?;
        }
        writeln!(out, "cluster_size: {}", qcow2.cluster_size)?;
        if qcow2.dirty {
            writeln!(out, "cleanly shut down: no")?;
        }
    }
    if let Some(foreign) = &info.foreign {
        if let Some(size) = foreign.cluster_size {
            writeln!(out, "cluster_size: {size}")?;
        }
        if foreign.dirty {
            writeln!(out, "cleanly shut down: no")?;
        }
    }
    if let Some(backing) = &info.backing_filename {
        let backing = printable(backing);
        write!(out, "backing file: {backing}")?;
        match info.full_backing_filename.as_deref().map(name) {
            Some(full) if full != backing => writeln!(out, " (actual path: {full})")?,
            _ => writeln!(out)?,
        }
    }
    if let Some(format) = &info.backing_format {
        writeln!(out, "backing file format: {}", printable(format))?;
    }
    snapshot_list(out, &info.snapshots)?;
    if let Some(qcow2) = &info.qcow2 {
        print_qcow2(out, qcow2)?;
    }
    if let Some(keys) = &info.luks {
        writeln!(out, "Format specific information:")?;
        print_keys(out, keys, "    ", None)?;
    }
    if let Some(vmdk) = info.foreign.as_ref().and_then(|foreign| foreign.vmdk.as_ref()) {
        print_vmdk(out, vmdk)?;
    }
    Ok(())
}

fn print_vmdk(out: &mut dyn Write, vmdk: &VmdkInfo) -> io::Result<()> {
    writeln!(out, "Format specific information:")?;
    writeln!(out, "    cid: {}", vmdk.content_id)?;
    writeln!(out, "    parent cid: {}", vmdk.parent_id)?;
    writeln!(out, "    create type: {}", printable(&vmdk.create_type))?;
    writeln!(out, "    extents:")?;
    for (number, extent) in vmdk.extents.iter().enumerate() {
        writeln!(out, "        [{number}]:")?;
        if extent.compressed {
            writeln!(out, "            compressed: true")?;
        }
        writeln!(out, "            virtual size: {}", extent.virtual_size)?;
        let name = extent.filename.display().to_string();
        writeln!(out, "            filename: {}", printable(&name))?;
        if let Some(size) = extent.cluster_size {
            writeln!(out, "            cluster size: {size}")?;
        }
        writeln!(out, "            format: {}", printable(&extent.format))?;
    }
    Ok(())
}

/// Prints the qcow2-specific information.
pub(crate) fn print_qcow2(out: &mut dyn Write, qcow2: &Qcow2Info) -> io::Result<()> {
    let v3 = qcow2.version >= 3;
    writeln!(out, "Format specific information:")?;
    writeln!(out, "    compat: {}", if v3 { "1.1" } else { "0.10" })?;
    writeln!(out, "    compression type: {}", qcow2.compression_type.name())?;
    if v3 {
        writeln!(out, "    lazy refcounts: {}", qcow2.lazy_refcounts)?;
    }
    if !qcow2.bitmaps.is_empty() {
        writeln!(out, "    bitmaps:")?;
        for (number, bitmap) in qcow2.bitmaps.iter().enumerate() {
            writeln!(out, "        [{number}]:")?;
            writeln!(out, "            flags:")?;
            let flags = [("in-use", bitmap.in_use), ("auto", bitmap.auto)];
            let set = flags.into_iter().filter(|(_, set)| *set);
            for (number, (flag, _)) in set.enumerate() {
                writeln!(out, "                [{number}]: {flag}")?;
            }
            writeln!(out, "            name: {}", printable(&bitmap.name))?;
            writeln!(out, "            granularity: {}", bitmap.granularity)?;
        }
    }
    writeln!(out, "    refcount bits: {}", qcow2.refcount_bits)?;
    if let Some(keys) = &qcow2.encryption {
        writeln!(out, "    encrypt:")?;
        print_keys(out, keys, "        ", Some("luks"))?;
    }
    if let Some(file) = &qcow2.data_file {
        writeln!(out, "    data file: {}", printable(file))?;
    }
    if let Some(raw) = qcow2.data_file_raw {
        writeln!(out, "    data file raw: {raw}")?;
    }
    if v3 {
        writeln!(out, "    corrupt: {}", qcow2.corrupt)?;
        writeln!(out, "    extended l2: {}", qcow2.extended_l2)?;
    }
    if qcow2.journal {
        writeln!(
            out,
            "    journal: in use; 'isobath check -r all' or any writer recovers the image"
        )?;
    }
    if let Some(index) = &qcow2.index {
        writeln!(out, "    direct-access index:")?;
        match &index.state {
            IndexState::Valid => writeln!(out, "        valid: true")?,
            IndexState::Invalid(reason) => {
                writeln!(out, "        valid: false ({})", printable(reason))?;
            }
            IndexState::Unchecked => {}
        }
        if index.layers > 0 {
            writeln!(out, "        layers: {}", index.layers)?;
        }
        if index.undigested > 0 {
            writeln!(out, "        layers without digest: {}", index.undigested)?;
        }
        writeln!(out, "        size: {}", human(index.bytes))?;
    }
    Ok(())
}

/// Prints what an encryption header says; `format` is the header's, where that is not the image's.
fn print_keys(
    out: &mut dyn Write,
    keys: &Info,
    indent: &str,
    format: Option<&str>,
) -> io::Result<()> {
    writeln!(out, "{indent}ivgen alg: {}", keys.iv_generator.name())?;
    writeln!(out, "{indent}hash alg: {}", keys.hash.name())?;
    writeln!(out, "{indent}cipher alg: {}", keys.algorithm.name())?;
    writeln!(out, "{indent}uuid: {}", printable(&keys.uuid))?;
    if let Some(hash) = keys.iv_hash {
        writeln!(out, "{indent}ivgen hash alg: {}", hash.name())?;
    }
    if let Some(format) = format {
        writeln!(out, "{indent}format: {format}")?;
    }
    writeln!(out, "{indent}cipher mode: {}", keys.mode.name())?;
    writeln!(out, "{indent}slots:")?;
    for (number, slot) in keys.slots.iter().enumerate() {
        writeln!(out, "{indent}    [{number}]:")?;
        writeln!(out, "{indent}        active: {}", slot.active)?;
        if slot.active {
            writeln!(out, "{indent}        iters: {}", slot.iterations)?;
        }
        writeln!(out, "{indent}        key offset: {}", slot.key_offset)?;
        if slot.active {
            writeln!(out, "{indent}        stripes: {}", slot.stripes)?;
        }
    }
    writeln!(out, "{indent}payload offset: {}", keys.payload_offset)?;
    writeln!(out, "{indent}master key iters: {}", keys.master_key_iterations)
}

/// Prints the list of internal snapshots; nothing if there are none.
pub(crate) fn snapshot_list(out: &mut dyn Write, snapshots: &[Snapshot]) -> io::Result<()> {
    if snapshots.is_empty() {
        return Ok(());
    }
    writeln!(out, "Snapshot list:")?;
    writeln!(
        out,
        "{:<9} {:<16} {:>8}{:>20}{:>13}{:>11}",
        "ID", "TAG", "VM SIZE", "DATE", "VM CLOCK", "ICOUNT"
    )?;
    for snapshot in snapshots {
        let seconds = snapshot.vm_clock_nsec / 1_000_000_000;
        let clock = format!(
            "{:02}:{:02}:{:02}.{:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60,
            snapshot.vm_clock_nsec / 1_000_000 % 1000
        );
        let icount = snapshot.icount.filter(|count| *count != u64::MAX);
        writeln!(
            out,
            "{} {} {:>8}{:>20}{clock:>13}{:>11}",
            padded(&printable(&snapshot.id_text()), 9),
            padded(&printable(&snapshot.name_text()), 16),
            human(snapshot.vm_state_size),
            calendar::shown(snapshot.date_sec.into()),
            icount.map_or_else(String::new, |count| count.to_string())
        )?;
    }
    Ok(())
}

/// Text padded to a width in bytes, as C does it.
fn padded(text: &str, width: usize) -> String {
    format!("{text}{:1$}", "", width.saturating_sub(text.len()))
}
