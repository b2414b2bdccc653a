//! FUSE: the disk as one file of the host.
