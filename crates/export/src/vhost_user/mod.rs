//! vhost-user-blk: the disk of a virtual machine, by memory shared with it.
