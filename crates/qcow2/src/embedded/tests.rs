//! What is embedded comes back, and nothing else passes for it.

use super::*;

const ZONE: ZoneId = ZoneId(*b"a zone's id: 16B");

fn mapping() -> Mapping {
    Mapping { cluster: ClusterIndex::new(7), serial: 9, proven: 5, rest: None }
}

#[test]
fn zeroes_come_back() {
    let mut block = [0; LEAD];
    assert_eq!(embed(&mut block, &mapping(), ZONE), Some(Span::Sector));
    let lead = Lead { mapping: mapping(), span: Span::Sector };
    assert_eq!(find(&block, ZONE), Some(lead));
    assert_eq!(find(&block, ZoneId([0; 16])), None);
    assert_eq!(extract(&mut block, ZONE), Some(lead));
    assert_eq!(block, [0; LEAD]);
    assert_eq!(extract(&mut block, ZONE), None);
}
