//! The kernel's interface (`linux/ublk_cmd.h`): commands, their payloads, and places in the character device.

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Where commands to the driver go.
pub(crate) const CONTROL: &str = "/dev/ublk-control";
/// Bytes per sector, the kernel's unit regardless of the block size.
pub(crate) const SECTOR: u64 = 512;
/// The number of a device that has none yet, and the queue of a command that is for no queue.
pub(crate) const ANY_DEVICE: u32 = u32::MAX;
const NO_QUEUE: u16 = u16::MAX;
/// The most requests in flight that a queue can have.
const MOST_DEPTH: u64 = 4096;
/// Data of requests begins here in the character device.
const DATA: u64 = 0x8000_0000;
/// Bits of an offset within a request's data, and of the request's tag.
const OFFSET_BITS: u32 = 25;
const TAG_BITS: u32 = 16;

/// Features of the driver.
pub(crate) mod feature {
    /// Another server may take over the device of one that has ended,
    pub(crate) const USER_RECOVERY: u64 = 1 << 3;
    /// and gets the requests again that this one had.
    pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are encoded as those of `ioctl` are.
    pub(crate) const IOCTL_ENCODE: u64 = 1 << 6;
    /// The server copies data by reading and writing the character device.
    pub(crate) const USER_COPY: u64 = 1 << 7;
}

/// Attributes of a disk.
pub(crate) mod attribute {
    pub(crate) const READ_ONLY: u32 = 1 << 0;
    pub(crate) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(crate) const FUA: u32 = 1 << 3;
}

/// The states of a device that is no disk, of one that is served, and of a disk that waits for another server; the
/// process that serves a disk that was.
pub(crate) const DEAD: u16 = 0;
pub(crate) const LIVE: u16 = 1;
pub(crate) const QUIESCED: u16 = 2;
pub(crate) const NOBODY: i32 = -1;

/// Commands to the driver, and those that fetch requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Command {
    GetDevice = 0x02,
    AddDevice = 0x04,
    DeleteDevice = 0x05,
    StartDevice = 0x06,
    StopDevice = 0x07,
    SetParameters = 0x08,
    GetParameters = 0x09,
    StartRecovery = 0x10,
    EndRecovery = 0x11,
    GetFeatures = 0x13,
    DeleteDeviceAsync = 0x14,
    Fetch = 0x20,
    CommitAndFetch = 0x21,
}

impl Command {
    /// The command as `ioctl` would have it: direction, length of the payload, type and number.
    pub(crate) const fn code(self) -> u32 {
        const READ: u32 = 2;
        const WRITE: u32 = 1;
        let (direction, length) = match self {
            Self::GetDevice | Self::GetParameters | Self::GetFeatures | Self::DeleteDeviceAsync => {
                (READ, size_of::<ControlPayload>())
            }
            Self::Fetch | Self::CommitAndFetch => (READ | WRITE, size_of::<IoPayload>()),
            _ => (READ | WRITE, size_of::<ControlPayload>()),
        };
        direction << 30 | (length as u32) << 16 | (b'u' as u32) << 8 | self as u32
    }
}

/// `struct ublksrv_ctrl_cmd`
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct ControlPayload {
    device: u32,
    queue: u16,
    length: u16,
    address: u64,
    data: u64,
    path_length: u16,
    padding: u16,
    reserved: u32,
}

impl ControlPayload {
    /// For a command to a device, with a buffer at `address`.
    pub(crate) fn new(device: u32, (address, length): (u64, u16), data: u64) -> Self {
        let queue = NO_QUEUE;
        Self { device, queue, length, address, data, path_length: 0, padding: 0, reserved: 0 }
    }

    /// The payload of an entry of 128 bytes.
    pub(crate) fn payload(&self) -> [u8; 80] {
        let mut payload = [0; 80];
        let (used, _) = payload.split_at_mut(size_of::<Self>());
        used.copy_from_slice(self.as_bytes());
        payload
    }
}

/// `struct ublksrv_ctrl_dev_info`
#[derive(Clone, Copy, Debug, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct DeviceInfo {
    pub(crate) queues: u16,
    pub(crate) depth: u16,
    pub(crate) state: u16,
    pub(crate) padding: u16,
    pub(crate) max_bytes: u32,
    pub(crate) device: u32,
    pub(crate) process: i32,
    pub(crate) padding_1: u32,
    pub(crate) flags: u64,
    /// The driver keeps it for the server, and does not look at it.
    pub(crate) private_flags: u64,
    pub(crate) owner: u32,
    pub(crate) group: u32,
    pub(crate) reserved: [u64; 2],
}

/// `struct ublk_params`, up to what is set here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Parameters {
    pub(crate) length: u32,
    pub(crate) types: u32,
    pub(crate) basic: Basic,
    pub(crate) discard: Discard,
    pub(crate) padding: u32,
}

impl Parameters {
    /// Where the driver is to put a device's parameters.
    pub(crate) fn room() -> Self {
        Self { length: size_of::<Self>() as u32, ..Self::new_zeroed() }
    }

    /// These, without what the driver adds: the numbers of the device, which begin in the last four bytes.
    pub(crate) fn set(self) -> Self {
        Self { types: self.types & (BASIC | DISCARD), padding: 0, ..self }
    }
}

/// `struct ublk_param_basic`
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Basic {
    pub(crate) attributes: u32,
    pub(crate) logical_shift: u8,
    pub(crate) physical_shift: u8,
    pub(crate) optimal_shift: u8,
    pub(crate) minimal_shift: u8,
    pub(crate) max_sectors: u32,
    pub(crate) chunk_sectors: u32,
    pub(crate) sectors: u64,
    pub(crate) boundary: u64,
}

/// `struct ublk_param_discard`
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Discard {
    pub(crate) alignment: u32,
    pub(crate) granularity: u32,
    pub(crate) max_sectors: u32,
    pub(crate) max_zero_sectors: u32,
    pub(crate) max_ranges: u16,
    pub(crate) reserved: u16,
}

/// Which of the [`Parameters`] are set.
pub(crate) const BASIC: u32 = 1 << 0;
pub(crate) const DISCARD: u32 = 1 << 1;

/// `struct ublksrv_io_cmd`
#[derive(Clone, Copy, Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct IoPayload {
    queue: u16,
    tag: u16,
    result: i32,
    address: u64,
}

impl IoPayload {
    /// Fetches requests of a tag, after the last one had this result.
    pub(crate) fn new(queue: u16, tag: u16, result: i32) -> Self {
        Self { queue, tag, result, address: 0 }
    }

    pub(crate) fn payload(&self) -> [u8; 16] {
        zerocopy::transmute!(*self)
    }
}

/// `struct ublksrv_io_desc`, a request.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(crate) struct Descriptor {
    /// The operation, and above it its flags.
    pub(crate) operation: u32,
    pub(crate) sectors: u32,
    pub(crate) start: u64,
    pub(crate) address: u64,
}

/// Operations.
pub(crate) mod operation {
    pub(crate) const READ: u32 = 0;
    pub(crate) const WRITE: u32 = 1;
    pub(crate) const FLUSH: u32 = 2;
    pub(crate) const DISCARD: u32 = 3;
    pub(crate) const WRITE_ZEROES: u32 = 5;
    /// Their bits of [`Descriptor::operation`](super::Descriptor::operation).
    pub(crate) const MASK: u32 = 0xff;
    /// The data is durable once the request has completed.
    pub(crate) const FUA: u32 = 1 << 13;
    /// Zeroes must not release the space.
    pub(crate) const NO_UNMAP: u32 = 1 << 15;
}

/// Where the descriptors of a queue are mapped from.
pub(crate) fn descriptors_at(queue: u16) -> u64 {
    u64::from(queue) * MOST_DEPTH * size_of::<Descriptor>() as u64
}

/// How many bytes the descriptors of a queue take: whole pages.
pub(crate) fn descriptors_length(depth: u16, page: usize) -> usize {
    (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page)
}

/// Where a request's data is from its byte `offset` on.
pub(crate) fn data_at(queue: u16, tag: u16, offset: u32) -> u64 {
    let place = u64::from(queue) << TAG_BITS | u64::from(tag);
    DATA + (place << OFFSET_BITS) + u64::from(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_and_structures_are_the_kernels() {
        // By the kernel's header and a C compiler.
        assert_eq!(Command::GetDevice.code(), 0x8020_7502);
        assert_eq!(Command::AddDevice.code(), 0xc020_7504);
        assert_eq!(Command::DeleteDevice.code(), 0xc020_7505);
        assert_eq!(Command::StartDevice.code(), 0xc020_7506);
        assert_eq!(Command::StopDevice.code(), 0xc020_7507);
        assert_eq!(Command::SetParameters.code(), 0xc020_7508);
        assert_eq!(Command::GetParameters.code(), 0x8020_7509);
        assert_eq!(Command::StartRecovery.code(), 0xc020_7510);
        assert_eq!(Command::EndRecovery.code(), 0xc020_7511);
        assert_eq!(Command::GetFeatures.code(), 0x8020_7513);
        assert_eq!(Command::DeleteDeviceAsync.code(), 0x8020_7514);
        assert_eq!(Command::Fetch.code(), 0xc010_7520);
        assert_eq!(Command::CommitAndFetch.code(), 0xc010_7521);
        assert_eq!((size_of::<DeviceInfo>(), size_of::<Descriptor>()), (64, 24));
        assert_eq!((size_of::<Basic>(), size_of::<Discard>()), (32, 20));
    }

    #[test]
    fn payloads_have_their_fields_in_place() {
        let payload = ControlPayload::new(7, (0x1122, 64), 5).payload();
        assert_eq!(payload[..8], [7, 0, 0, 0, 0xff, 0xff, 64, 0]);
        assert_eq!(payload[8..16], 0x1122_u64.to_ne_bytes());
        assert_eq!(payload[16..24], 5_u64.to_ne_bytes());
        assert!(payload[24..].iter().all(|byte| *byte == 0));
        let payload = IoPayload::new(1, 2, -5).payload();
        assert_eq!(payload, [1, 0, 2, 0, 0xfb, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_device_has_its_fields_in_place() {
        let mut bytes = [0_u8; 64];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = at as u8;
        }
        let info: DeviceInfo = zerocopy::transmute!(bytes);
        assert_eq!((info.queues, info.depth, info.state), (0x100, 0x302, 0x504));
        assert_eq!(
            (info.max_bytes, info.device, info.process),
            (0xb0a_0908, 0xf0e_0d0c, 0x1312_1110)
        );
        assert_eq!(info.flags, u64::from_ne_bytes(*bytes[24..].first_chunk().unwrap()));
        assert_eq!(info.private_flags, u64::from_ne_bytes(*bytes[32..].first_chunk().unwrap()));
        assert_eq!((info.owner, info.group), (0x2b2a_2928, 0x2f2e_2d2c));
    }

    #[test]
    fn parameters_are_what_was_set() {
        let room = Parameters::room();
        assert_eq!((room.length, room.set()), (64, room));
        // The driver says that there are numbers of the device, and has no room for more than the first one.
        let told = Parameters { types: BASIC | 1 << 2, padding: 241, ..room };
        assert_eq!(told.set(), Parameters { types: BASIC, ..room });
        let sectors = Basic { sectors: 8, ..room.basic };
        assert_ne!(Parameters { basic: sectors, ..told }.set(), told.set());
    }

    #[test]
    fn no_two_requests_share_a_place() {
        assert_eq!(data_at(0, 0, 0), 0x8000_0000);
        assert_eq!(data_at(0, 0, (1 << 25) - 1) + 1, data_at(0, 1, 0));
        assert_eq!(data_at(0, u16::MAX, (1 << 25) - 1) + 1, data_at(1, 0, 0));
        assert_eq!((descriptors_at(0), descriptors_at(2)), (0, 2 * 4096 * 24));
        assert_eq!((descriptors_length(1, 4096), descriptors_length(171, 4096)), (4096, 8192));
    }
}
