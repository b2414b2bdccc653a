//! Key slots added and erased, by QEMU and here.

use crate::support::{Image, SHORT, create, secret};
use isobath_luks::{
    Amend, Change, CreateOptions, Created, Error, Header, MasterKey, Secret, SlotState,
    system_random,
};

const ACTIVE: Amend<'_> = Amend {
    state: SlotState::Active,
    slot: None,
    new_secret: None,
    old_secret: None,
    iter_time: None,
    force: false,
};

const INACTIVE: Amend<'_> = Amend { state: SlotState::Inactive, ..ACTIVE };

fn add(new: &Secret) -> Amend<'_> {
    Amend { new_secret: Some(new), iter_time: Some(SHORT), ..ACTIVE }
}

fn amend(image: &Image, key: &MasterKey, amend: &Amend<'_>) -> Result<Change, Error> {
    image.header().amend(&image.area(), key, amend, &mut system_random)
}

/// Does it in the image.
fn amended(image: &Image, key: &MasterKey, change: &Amend<'_>) {
    for write in amend(image, key, change).unwrap().writes {
        image.write(write.offset as usize, &write.bytes);
    }
}

#[test]
fn slots_from_here_are_opened_by_qemu() {
    let image = Image::new("first", "");
    let _ = image.io("first", &["write -P 0x5a 0 64k"]).ok();
    let (_, key) = image.unlock("first");
    let new = secret("second");
    amended(&image, &key, &Amend { slot: Some(6), ..add(&new) });
    amended(&image, &key, &add(&secret("third")));
    for (slot, password) in [(0, "first"), (6, "second"), (1, "third")] {
        let _ = image.io(password, &["read -P 0x5a 0 64k"]).ok();
        assert_eq!(image.unlock(password).0, slot);
    }
    let first = secret("first");
    amended(&image, &key, &Amend { slot: Some(1), ..INACTIVE });
    amended(&image, &key, &Amend { old_secret: Some(&first), ..INACTIVE });
    for (password, code) in [("first", 1), ("third", 1), ("second", 0)] {
        let _ = image.io(password, &["read -P 0x5a 0 64k"]).exits(code);
    }
    // QEMU goes on with what it finds.
    let secrets = ["fourth", "second"];
    let _ = image.amend("second", secrets, "state=active,new-secret=new,iter-time=1", false).ok();
    let _ = image.amend("fourth", secrets, "state=inactive,old-secret=old", false).ok();
    assert_eq!(image.unlock("fourth").0, 0);
    assert_eq!(image.header().info().slots.map(|slot| slot.active), {
        let mut active = [false; 8];
        active[0] = true;
        active
    });
}

#[test]
fn slots_by_qemu_are_opened_here() {
    let image = Image::new("first", "cipher-alg=aes-128,cipher-mode=cbc,ivgen-alg=essiv");
    let secrets = ["second", "first"];
    let options = "state=active,new-secret=new,keyslot=7,iter-time=1";
    let _ = image.amend("first", secrets, options, false).ok();
    assert_eq!(image.unlock("first").0, 0);
    assert_eq!(image.unlock("second").0, 7);
    let _ = image.amend("second", secrets, "state=inactive,old-secret=old", false).ok();
    assert!(image.header().unlock(&image.area(), &secret("first")).is_err());
    assert_eq!(image.unlock("second").0, 7);
    let slot = image.header().info().slots[0];
    assert_eq!((slot.active, slot.iterations), (false, 0));
}

/// Each refusal is asked of both, with QEMU's options beside ours.
#[test]
fn refusals_are_in_the_words_of_qemu() {
    let image = Image::new("first", "");
    let (_, key) = image.unlock("first");
    let (first, wrong, new) = (secret("first"), secret("wrong"), secret("new"));
    let compare = |options: &str, old: &str, change: &Amend<'_>| {
        let failed = image.amend("first", ["new", old], options, change.force).exits(1);
        let error = amend(&image, &key, change).unwrap_err().to_string();
        let line = failed.stderr.lines().next().unwrap();
        assert_eq!(line, format!("qemu-img: {error}"), "{options}");
    };
    compare("state=active", "", &ACTIVE);
    compare(
        "state=active,keyslot=9,old-secret=old",
        "first",
        &Amend { old_secret: Some(&first), slot: Some(9), ..ACTIVE },
    );
    compare(
        "state=active,new-secret=new,old-secret=old",
        "first",
        &Amend { old_secret: Some(&first), ..add(&new) },
    );
    compare("state=active,new-secret=new,keyslot=8", "", &Amend { slot: Some(8), ..add(&new) });
    compare("state=active,new-secret=new,keyslot=0", "", &Amend { slot: Some(0), ..add(&new) });
    compare("state=inactive", "", &INACTIVE);
    compare(
        "state=inactive,new-secret=new,keyslot=9",
        "",
        &Amend { new_secret: Some(&new), slot: Some(9), ..INACTIVE },
    );
    compare(
        "state=inactive,iter-time=1,keyslot=9",
        "",
        &Amend { iter_time: Some(SHORT), slot: Some(9), ..INACTIVE },
    );
    compare("state=inactive,keyslot=9", "", &Amend { slot: Some(9), ..INACTIVE });
    compare("state=inactive,keyslot=-1", "", &Amend { slot: Some(-1), ..INACTIVE });
    compare("state=inactive,keyslot=5", "", &Amend { slot: Some(5), ..INACTIVE });
    compare("state=inactive,keyslot=0", "", &Amend { slot: Some(0), ..INACTIVE });
    for (slot, force) in [(0, false), (0, true), (5, false), (5, true)] {
        let options = format!("state=inactive,keyslot={slot},old-secret=old");
        let change = Amend { slot: Some(slot), old_secret: Some(&wrong), force, ..INACTIVE };
        compare(&options, "wrong", &change);
    }
    for force in [false, true] {
        let change = Amend { old_secret: Some(&wrong), force, ..INACTIVE };
        compare("state=inactive,old-secret=old", "wrong", &change);
    }
    let change = Amend { old_secret: Some(&first), ..INACTIVE };
    compare("state=inactive,old-secret=old", "first", &change);

    for _ in 1..8 {
        amended(&image, &key, &add(&new));
    }
    for force in [false, true] {
        let change = Amend { force, ..add(&new) };
        compare("state=active,new-secret=new", "", &change);
    }
}

#[test]
fn force_overwrites_and_erases() {
    let image = Image::new("first", "");
    let (_, key) = image.unlock("first");
    let new = secret("second");
    amended(&image, &key, &Amend { slot: Some(0), force: true, ..add(&new) });
    let _ = image.io("first", &["read 0 512"]).exits(1);
    let _ = image.io("second", &["read 0 512"]).ok();
    assert_eq!(image.header().info().slots.iter().filter(|slot| slot.active).count(), 1);
    amended(&image, &key, &Amend { slot: Some(0), force: true, ..INACTIVE });
    let _ = image.io("second", &["read 0 512"]).exits(1);
    assert!(image.header().unlock(&image.area(), &new).is_err());
    // An inactive slot may be erased again.
    amended(&image, &key, &Amend { slot: Some(3), force: true, ..INACTIVE });
}

/// Whatever part of a change has reached the image.
fn states(area: &[u8], change: &Change) -> Vec<Vec<u8>> {
    let mut area = area.to_vec();
    let mut states = vec![area.clone()];
    for write in &change.writes {
        let offset = write.offset as usize;
        // Every sector that the write touches may be there or not.
        let mut parts = vec![offset];
        parts.extend((offset + 1..offset + write.bytes.len()).filter(|at| at % 512 == 0));
        parts.push(offset + write.bytes.len());
        let last = parts.len() - 1;
        // All of long writes' states take too long to try: the first and the last sectors alone.
        for pair in [0..1, last - 1..last].into_iter().map(|at| &parts[at.start..=at.end]) {
            let mut torn = area.clone();
            torn[pair[0]..pair[1]]
                .copy_from_slice(&write.bytes[pair[0] - offset..pair[1] - offset]);
            states.push(torn);
        }
        area[offset..offset + write.bytes.len()].copy_from_slice(&write.bytes);
        states.push(area.clone());
    }
    states
}

fn opens(area: &[u8], password: &str) -> bool {
    let header = Header::parse(area, area.len() as u64).unwrap();
    header.unlock(area, &secret(password)).is_ok()
}

/// What the image has afterwards.
fn after(made: &Created, area: &[u8], change: &Amend<'_>) -> Vec<u8> {
    let header = Header::parse(area, area.len() as u64).unwrap();
    let change = header.amend(area, &made.key, change, &mut system_random).unwrap();
    states(area, &change).pop().unwrap()
}

#[test]
fn no_crash_loses_the_last_key() {
    let made = create(&CreateOptions::default(), "first");
    let (new, first) = (secret("second"), secret("first"));
    for slot in 1..8 {
        let change = Amend { slot: Some(slot), ..add(&new) };
        let change = made.header.amend(&made.area, &made.key, &change, &mut system_random).unwrap();
        let states = states(&made.area, &change);
        for state in &states {
            let header = Header::parse(state, state.len() as u64).unwrap();
            let active = header.info().slots.iter().filter(|slot| slot.active).count();
            // A slot that is active has the key: it counts, when others are erased.
            assert_eq!(opens(state, "second"), active == 2);
            assert!(opens(state, "first"));
        }
        assert!(opens(states.last().unwrap(), "second"));
    }
    // Overwritten by force, with free slots: there is always one that holds a secret the user knows.
    let change = Amend { slot: Some(0), force: true, ..add(&new) };
    let change = made.header.amend(&made.area, &made.key, &change, &mut system_random).unwrap();
    for state in states(&made.area, &change) {
        assert!(opens(&state, "first") || opens(&state, "second"));
    }
    // Erased.
    let two = after(&made, &made.area, &add(&new));
    let header = Header::parse(&two, two.len() as u64).unwrap();
    let change = Amend { old_secret: Some(&first), ..INACTIVE };
    let change = header.amend(&two, &made.key, &change, &mut system_random).unwrap();
    let states = states(&two, &change);
    for state in &states {
        let header = Header::parse(state, state.len() as u64).unwrap();
        let active = header.info().slots.iter().filter(|slot| slot.active).count();
        assert!(opens(state, "second"));
        assert_eq!(opens(state, "first"), active == 2);
    }
    assert!(!opens(states.last().unwrap(), "first"));
    let before = &made.area[4096..260_096];
    let wiped = &states.last().unwrap()[4096..260_096];
    assert!(before.iter().zip(wiped).filter(|(one, other)| one != other).count() > 250_000);
}

#[test]
fn the_changed_header_is_the_written_one() {
    let made = create(&CreateOptions::default(), "first");
    let new = secret("second");
    let change = made.header.amend(&made.area, &made.key, &add(&new), &mut system_random).unwrap();
    let area = states(&made.area, &change).pop().unwrap();
    assert_eq!(Header::parse(&area, area.len() as u64).unwrap(), change.header);
}
