//! Refcount tables and blocks of every width.
#![no_main]

use isobath_qcow2::{Geometry, RefcountOrder, RefcountTableEntry};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[order, bits, at, value], block)) = data.split_first_chunk() else { return };
    let Ok(geometry) = Geometry::new(3, bits.into(), order.into(), false, false) else { return };
    let order = RefcountOrder::new(order.into()).expect("checked by the geometry");
    for index in 0.. {
        let Some(entry) = RefcountTableEntry::read(block, index) else { break };
        if let Ok(Some(offset)) = entry.offset(&geometry) {
            let again = RefcountTableEntry::new(offset, &geometry).expect("valid");
            assert_eq!(again.raw(), entry.raw() & !entry.reserved_bits());
        }
    }
    let read =
        |block: &[u8]| -> Vec<u64> { (0..).map_while(|index| order.read(block, index)).collect() };
    let before = read(block);
    let mut changed = block.to_vec();
    let (at, value) = (usize::from(at), u64::from(value));
    match order.write(&mut changed, at, value) {
        Ok(()) => {
            let mut expected = before;
            expected[at] = value;
            assert_eq!(read(&changed), expected);
        }
        Err(_) => {
            assert!(at >= before.len() || value > order.max());
            assert_eq!(changed, block);
        }
    }
});
