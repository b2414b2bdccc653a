//! The table of frontends.

use crate::frontend::{Entrance, Frontend, FrontendError, Protocol, Start};
use crate::{fuse, nbd, ublk, vhost_user};
use isobath_disk::{BlockDevice, MemoryLimit};
use isobath_ring::{Handle, JoinHandle, spawn};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// The table: the protocol and the type of each frontend.
macro_rules! frontends {
    ($($protocol:path => $frontend:ty),* $(,)?) => {
        /// The protocols, in the order in which they are started.
        pub const PROTOCOLS: &[&Protocol] = &[$(&$protocol),*];

        fn start_all<D: BlockDevice>(
            mut start: impl FnMut(&'static Protocol) -> Start,
        ) -> Result<Vec<Rc<dyn Frontend<D>>>, FrontendError> {
            Ok(vec![$(Rc::new(<$frontend as Frontend<D>>::start(start(&$protocol))?)),*])
        }
    };
}

frontends! {
    nbd::PROTOCOL => nbd::NbdFrontend<D>,
    vhost_user::PROTOCOL => vhost_user::VhostUserFrontend,
    fuse::PROTOCOL => fuse::FuseFrontend,
    ublk::PROTOCOL => ublk::UblkFrontend,
}

/// All frontends, started.
pub struct Frontends<D: BlockDevice>(Vec<Rc<dyn Frontend<D>>>);

/// Where clients of [shared](Protocol::shared) servers connect, by protocol name.
pub type Listeners = BTreeMap<&'static str, Vec<Entrance>>;

impl<D: BlockDevice> Frontends<D> {
    /// Starts all frontends. Clients are served by `workers`, or on this thread if there are none.
    ///
    /// # Errors
    /// A frontend cannot be started.
    pub fn start(workers: &[Handle], listeners: Listeners) -> Result<Self, FrontendError> {
        Self::start_within(workers, listeners, None)
    }

    /// As [`start`](Self::start), with a limit on memory that they share with others.
    ///
    /// # Errors
    /// As [`start`](Self::start); also if less is left of the limit than a frontend may take.
    pub fn start_within(
        workers: &[Handle],
        mut listeners: Listeners,
        memory: Option<&Arc<MemoryLimit>>,
    ) -> Result<Self, FrontendError> {
        let start = |protocol: &Protocol| Start {
            workers: workers.to_vec(),
            listeners: listeners.remove(protocol.name).unwrap_or_default(),
            memory: memory.cloned(),
        };
        start_all(start).map(Self)
    }

    /// All frontends, in the order of [`PROTOCOLS`].
    pub fn iter(&self) -> impl Iterator<Item = &dyn Frontend<D>> {
        self.0.iter().map(|frontend| &**frontend)
    }

    /// The frontend of the protocol with this name.
    pub fn of(&self, protocol: &str) -> Option<&dyn Frontend<D>> {
        self.iter().find(|frontend| frontend.protocol().name == protocol)
    }

    /// Serves clients of the [shared](Protocol::shared) servers until [`stop`](Self::stop), with one task per listener
    /// on this thread. Call this only once.
    pub fn serve(&self) -> Vec<JoinHandle<io::Result<()>>> {
        self.iter().flat_map(Frontend::serve).map(spawn).collect()
    }

    /// Stops the [shared](Protocol::shared) servers and their exports.
    pub fn stop(&self) {
        self.iter().for_each(Frontend::stop);
    }
}

impl<D: BlockDevice> Clone for Frontends<D> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frontend::{Parameter, Presence};
    use std::collections::BTreeSet;

    #[test]
    fn names_are_told_apart() {
        let mut flags = BTreeSet::new();
        let mut names = BTreeSet::new();
        for protocol in PROTOCOLS {
            assert!(names.insert(protocol.name), "{}", protocol.name);
            let all: Vec<&Parameter> =
                [&protocol.location].into_iter().chain(protocol.parameters).collect();
            let own: BTreeSet<_> = all.iter().map(|parameter| parameter.name).collect();
            assert_eq!(own.len(), all.len(), "{}", protocol.name);
            for parameter in all {
                let Some(option) = &parameter.option else {
                    assert_ne!(parameter.qmp, Presence::Absent, "nobody sets {}", parameter.name);
                    continue;
                };
                assert!(flags.insert(option.flag), "--{}", option.flag);
            }
            // An export of a shared server has no location of its own; a block device is only exported at the start.
            let is_absent = protocol.location.qmp == Presence::Absent;
            assert_eq!(protocol.shared || protocol.name == "ublk", is_absent);
        }
    }
}
