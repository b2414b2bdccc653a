//! Calls that an executor's thread makes itself, though they may have to wait.

use super::local::{self, Local};
use std::rc::Rc;
use std::time::Instant;

/// A call that hardly ever waits, made by the executor's thread, from when this is made until it is dropped.
///
/// All tasks of the executor wait with it. If it takes long, no other is begun before a hundred times as long has
/// passed.
pub struct Brief {
    local: Option<Rc<Local>>,
    began: Instant,
}

impl Brief {
    /// A call that transfers `bytes` bytes, if one may be made now: it counts for what [tasks may do without
    /// waiting](crate::may_go_on) in a turn. Outside `block_on` it always may.
    pub fn begin(bytes: usize) -> Option<Self> {
        let local = local::current();
        if local.as_ref().is_some_and(|local| !local.may_be_brief()) || !local::may_go_on(bytes) {
            return None;
        }
        Some(Self { local, began: Instant::now() })
    }
}

impl Drop for Brief {
    fn drop(&mut self) {
        if let Some(local) = &self.local {
            local.was_brief(self.began.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_executor_makes_no_more_calls_after_a_long_one() {
        assert!(Brief::begin(4096).is_some());
        let executor = crate::Executor::new(&crate::Config::default()).unwrap();
        executor.block_on(async {
            let call = Brief::begin(4096).unwrap();
            assert!(call.local.is_some());
            call.local.as_ref().unwrap().was_brief(Duration::from_hours(1));
            assert!(Brief::begin(4096).is_none());
        });
        assert!(Brief::begin(4096).is_some());
    }
}
