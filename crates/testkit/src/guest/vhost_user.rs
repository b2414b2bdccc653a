//! Disks over vhost-user-blk.

use super::Guest;
use std::path::Path;

impl Guest {
    /// Connects the guest, sharing all of its memory, to the vhost-user-blk server on a unix socket. QEMU reconnects
    /// when the server ends and another one listens there. Call it after [`memory`](Self::memory).
    #[must_use]
    pub fn vhost_user(mut self, socket: &Path, queues: u16) -> Self {
        let disk = self.disks;
        self.disks += 1;
        if !self.shared_memory {
            self.shared_memory = true;
            self.arguments.extend(crate::args![
                "-object",
                format!("memory-backend-memfd,id=memory,size={}M,share=on", self.memory),
                "-machine",
                "memory-backend=memory",
            ]);
        }
        let socket = socket.display();
        self.arguments.extend(crate::args![
            "-chardev",
            format!("socket,id=vhost{disk},path={socket},reconnect=1"),
            "-device",
            format!(
                "vhost-user-blk-pci,chardev=vhost{disk},id=vhost-disk{disk},num-queues={queues}"
            ),
        ]);
        self
    }
}
