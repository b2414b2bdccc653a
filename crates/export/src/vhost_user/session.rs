//! One client: its messages on the socket, until it leaves.

use super::bounce::Bounces;
use super::config::{self, EVENT_INDEX, FLUSH, PROTOCOL_FEATURES};
use super::inflight::{self, Region};
use super::memory::{MAX_REGIONS, Memory, RegionAt};
use super::notify::check_eventfd;
use super::options::Options;
use super::request::ID_BYTES;
use super::ring::Addresses;
use super::vring::{Common, Vring};
use super::wire::{
    ConfigPart, Connection, InFlightArea, MAX_BODY, MemoryRegion, Message, VringAddress,
    VringState, code, invalid, protocol,
};
use crate::give_way::give_way;
use crate::stop::Stop;
use isobath_disk::BlockDevice;
use isobath_ring::Handle;
use std::fs::File;
use std::future::{Future, poll_fn};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use zerocopy::IntoBytes;

/// The protocol features offered.
const OFFERED: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::BACKEND_REQ
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS
    | protocol::STATUS;
/// In a message with a queue's descriptor: the mask of the queue's index, and the flag for no descriptor.
const VRING_INDEX: u64 = 0xff;
const NO_DESCRIPTOR: u64 = 1 << 8;

/// The reply to a message.
enum Reply {
    /// Only an acknowledgement, if the client wants one.
    Done,
    /// Like `Done`, but the request failed.
    Refused,
    Body(Vec<u8>),
    WithFile(Vec<u8>, File),
}

impl Reply {
    fn number(value: u64) -> Self {
        Self::Body(value.to_ne_bytes().to_vec())
    }
}

/// An event that a session waits for.
enum Event {
    Stop,
    Message(io::Result<Option<Message>>),
    Resized,
    /// Memory that the client shares is no longer there.
    Lost,
}

/// What a server serves to its clients.
pub(crate) struct Served<D> {
    pub(crate) device: Arc<D>,
    pub(crate) bounces: Arc<Bounces>,
    pub(crate) options: Options,
    pub(crate) stop: Stop,
}

/// A client and its queues.
pub(crate) struct Session<'a, D> {
    served: &'a Served<D>,
    features: u64,
    protocol_features: u64,
    memory: Arc<Memory>,
    vrings: Vec<Vring>,
    in_flight: Option<Arc<Region>>,
    /// The channel on which the client is notified of changes.
    channel: Option<Connection>,
    /// The disk's size that the client knows.
    told_size: u64,
    status: u8,
    /// Requested by a queue that found memory missing.
    lost: Arc<Stop>,
}

impl<'a, D: BlockDevice> Session<'a, D> {
    pub(crate) fn new(served: &'a Served<D>, workers: &[Handle]) -> Self {
        let vring = |(worker, index): (&Handle, u16)| Vring::new(index, worker.clone(), true);
        Self {
            served,
            features: 0,
            protocol_features: 0,
            memory: Arc::default(),
            vrings: workers.iter().cycle().zip(0..served.options.queues).map(vring).collect(),
            in_flight: None,
            channel: None,
            told_size: served.device.size(),
            status: 0,
            lost: Arc::default(),
        }
    }

    /// Serves the client until it leaves or the server stops. All requests have then ended, except those that a paused
    /// disk leaves in the list of those in flight.
    pub(crate) async fn run(mut self, socket: UnixStream) {
        tracing::info!("a client connected");
        let mut connection = Connection::from(socket);
        loop {
            let ended = match self.next(&mut connection).await {
                Event::Stop | Event::Message(Ok(None)) => Ok(true),
                Event::Message(Ok(Some(message))) => {
                    // A client may have sent thousands.
                    give_way().await;
                    self.answer(&connection, message).await.map(|()| false)
                }
                Event::Message(Err(error)) => Err(error),
                Event::Lost => Err(invalid("it has cut its memory short")),
                Event::Resized => {
                    self.tell_size().await;
                    Ok(false)
                }
            };
            match ended {
                Ok(false) => {}
                Ok(true) => break,
                Err(error) => {
                    tracing::warn!(%error, "disconnecting the client");
                    break;
                }
            }
        }
        self.stop_all().await;
        tracing::info!("the client disconnected");
    }

    async fn next(&self, connection: &mut Connection) -> Event {
        let device = &self.served.device;
        let mut stopped = pin!(self.served.stop.requested());
        let mut lost = pin!(self.lost.requested());
        let mut message = pin!(connection.receive());
        let mut resized = pin!(device.resized(self.told_size));
        let hears = self.channel.is_some();
        poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Event::Stop);
            }
            if lost.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Event::Lost);
            }
            if let Poll::Ready(message) = message.as_mut().poll(cx) {
                return Poll::Ready(Event::Message(message));
            }
            if hears && resized.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Event::Resized);
            }
            Poll::Pending
        })
        .await
    }

    async fn answer(&mut self, connection: &Connection, message: Message) -> io::Result<()> {
        let Message { code, needs_reply, .. } = message;
        let wants_ack = needs_reply && self.protocol_features & protocol::REPLY_ACK != 0;
        let (body, file, refusal) = match self.handle(message).await {
            Ok(Reply::Body(body)) => (body, None, None),
            Ok(Reply::WithFile(body, file)) => (body, Some(file), None),
            Ok(reply) if wants_ack => {
                let failed = u64::from(matches!(reply, Reply::Refused));
                (failed.to_ne_bytes().to_vec(), None, None)
            }
            Ok(_) => return Ok(()),
            Err(error) if wants_ack => (1_u64.to_ne_bytes().to_vec(), None, Some(error)),
            Err(error) => {
                return Err(io::Error::new(error.kind(), format!("message {code}: {error}")));
            }
        };
        if let Some(error) = refusal {
            tracing::warn!(code, %error, "rejected a client's message");
        }
        self.unless_over(connection.reply(code, &body, file.as_ref())).await
    }

    /// The result of sending something, which may wait for the client; an error once the session should end.
    async fn unless_over(&self, sent: impl Future<Output = io::Result<()>>) -> io::Result<()> {
        let mut stopped = pin!(self.served.stop.requested());
        let mut lost = pin!(self.lost.requested());
        let mut sent = pin!(sent);
        poll_fn(|cx| {
            let over = stopped.as_mut().poll(cx).is_ready() || lost.as_mut().poll(cx).is_ready();
            if over {
                let reason = "it does not take what it is sent";
                return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)));
            }
            sent.as_mut().poll(cx)
        })
        .await
    }

    async fn handle(&mut self, mut message: Message) -> io::Result<Reply> {
        match message.code {
            code::GET_FEATURES => Ok(Reply::number(self.offered())),
            code::SET_FEATURES => self.set_features(message.read()?).await,
            code::SET_OWNER => Ok(Reply::Done),
            code::RESET_OWNER | code::RESET_DEVICE => {
                self.reset().await;
                self.forget_in_flight();
                Ok(Reply::Done)
            }
            code::GET_PROTOCOL_FEATURES => Ok(Reply::number(OFFERED)),
            code::SET_PROTOCOL_FEATURES => {
                let features: u64 = message.read()?;
                if features & !OFFERED != 0 {
                    return Err(invalid("protocol features were set that were not offered"));
                }
                self.protocol_features = features;
                Ok(Reply::Done)
            }
            code::GET_QUEUE_NUM => Ok(Reply::number(u64::from(self.served.options.queues))),
            code::GET_MAX_MEM_SLOTS => Ok(Reply::number(MAX_REGIONS as u64)),
            code::SET_MEM_TABLE => self.set_memory(message).await,
            code::ADD_MEM_REG => {
                let file = File::from(message.file()?);
                let (_, region): (u64, MemoryRegion) = single_region(&message)?;
                let memory = self.memory.with(region.into(), &file)?;
                self.change_memory(memory).await
            }
            code::REM_MEM_REG => {
                let (_, region): (u64, MemoryRegion) = single_region(&message)?;
                let memory = self.memory.without(region.into());
                let memory = memory.ok_or_else(|| invalid("the memory region does not exist"))?;
                self.change_memory(memory).await
            }
            code::GET_CONFIG => self.get_config(&message),
            // No field of the configuration space can be written.
            code::SET_CONFIG => Ok(Reply::Refused),
            code::SET_BACKEND_REQ_FD => {
                self.channel = Some(Connection::from(message.file()?));
                Ok(Reply::Done)
            }
            code::GET_INFLIGHT_FD => self.get_in_flight(message),
            code::SET_INFLIGHT_FD => self.set_in_flight(message),
            code::SET_STATUS => {
                let status: u64 = message.read()?;
                self.status = u8::try_from(status)
                    .map_err(|_| invalid("the status does not fit in a byte"))?;
                if self.status == 0 {
                    self.reset().await;
                }
                Ok(Reply::Done)
            }
            code::GET_STATUS => Ok(Reply::number(u64::from(self.status))),
            code::SET_VRING_NUM
            | code::SET_VRING_BASE
            | code::GET_VRING_BASE
            | code::SET_VRING_ENABLE => self.set_vring(message.code, message.read()?).await,
            code::SET_VRING_ADDR => self.set_addresses(message.read()?).await,
            code::SET_VRING_KICK | code::SET_VRING_CALL | code::SET_VRING_ERR => {
                self.set_notifier(message).await
            }
            _ => Err(invalid("unknown message type")),
        }
    }

    fn offered(&self) -> u64 {
        config::features(&*self.served.device, &self.served.options)
    }

    async fn set_features(&mut self, features: u64) -> io::Result<Reply> {
        if features & !self.offered() != 0 {
            return Err(invalid("features were set that were not offered"));
        }
        if features == self.features {
            return Ok(Reply::Done);
        }
        let running = self.pause().await;
        // Without protocol features, queues are always enabled.
        let was = self.features & PROTOCOL_FEATURES != 0;
        let is = features & PROTOCOL_FEATURES != 0;
        if is != was {
            self.vrings.iter_mut().for_each(|vring| vring.enabled = !is);
        }
        self.features = features;
        self.resume(&running)
    }

    async fn set_memory(&mut self, mut message: Message) -> io::Result<Reply> {
        let files = std::mem::take(&mut message.files);
        let ([count, _], mut rest): ([u32; 2], _) = message.read_prefix()?;
        if count as usize != files.len() {
            return Err(invalid("the memory table has the wrong number of file descriptors"));
        }
        let mut memory = Memory::default();
        for file in files {
            let (region, next) = zerocopy::FromBytes::read_from_prefix(rest)
                .map_err(|_| invalid("the memory table is too short"))?;
            let region: MemoryRegion = region;
            rest = next;
            memory = memory.with(region.into(), &File::from(file))?;
        }
        self.change_memory(memory).await
    }

    async fn change_memory(&mut self, memory: Memory) -> io::Result<Reply> {
        let running = self.pause().await;
        self.memory = Arc::new(memory);
        self.resume(&running)
    }

    fn get_config(&mut self, message: &Message) -> io::Result<Reply> {
        let (part, payload): (ConfigPart, _) = message.read_prefix()?;
        let most = MAX_BODY - size_of::<ConfigPart>();
        let end = part.offset.checked_add(part.size).map_or(usize::MAX, |end| end as usize);
        if end > most || payload.len() != part.size as usize {
            // A reply without configuration bytes signals an error.
            return Ok(Reply::Body(ConfigPart { size: 0, ..part }.as_bytes().to_vec()));
        }
        self.told_size = self.served.device.size();
        let space = config::space(&*self.served.device, &self.served.options, self.told_size);
        let mut body = part.as_bytes().to_vec();
        body.extend(config::part(&space, part.offset, part.size));
        Ok(Reply::Body(body))
    }

    /// Notifies the client that the configuration space has changed. The client then reads it.
    async fn tell_size(&mut self) {
        self.told_size = self.served.device.size();
        if self.protocol_features & protocol::CONFIG == 0 {
            return;
        }
        if let Some(channel) = &self.channel
            && let Err(error) = self.unless_over(channel.tell(code::BACKEND_CONFIG_CHANGE)).await
        {
            tracing::warn!(%error, "cannot notify a client of the disk's new size");
            self.channel = None;
        }
    }

    fn get_in_flight(&self, mut message: Message) -> io::Result<Reply> {
        let asked = in_flight_area(&mut message)?;
        let options = &self.served.options;
        if asked.queues > options.queues || asked.queue_size > options.queue_size {
            return Err(invalid("the list of requests in flight has too many or too large queues"));
        }
        let file = inflight::create(asked.queues, asked.queue_size)?;
        let length = inflight::length(asked.queues, asked.queue_size);
        let area = InFlightArea { length, offset: 0, padding: 0, ..asked };
        Ok(Reply::WithFile(area.as_bytes().to_vec(), file))
    }

    fn set_in_flight(&mut self, mut message: Message) -> io::Result<Reply> {
        let file = File::from(message.file()?);
        let area = in_flight_area(&mut message)?;
        if self.vrings.iter().any(Vring::is_running) {
            return Err(invalid(
                "the list of requests in flight cannot be replaced while queues run",
            ));
        }
        let region = Region::new(&file, area.offset, area.length, area.queues, area.queue_size)?;
        self.in_flight = Some(Arc::new(region));
        Ok(Reply::Done)
    }

    fn vring(&mut self, index: u32) -> io::Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or_else(|| invalid("the queue does not exist"))
    }

    async fn set_vring(&mut self, code: u32, state: VringState) -> io::Result<Reply> {
        let most = u32::from(self.served.options.queue_size);
        let VringState { index, value } = state;
        let vring = self.vring(index)?;
        match code {
            code::GET_VRING_BASE => {
                vring.stop().await;
                vring.kick = None;
                let value = u32::from(vring.base);
                return Ok(Reply::Body(VringState { index, value }.as_bytes().to_vec()));
            }
            code::SET_VRING_ENABLE => {
                if value > 1 {
                    return Err(invalid("the enable value is neither 0 nor 1"));
                }
                vring.enabled = value == 1;
                if value == 0 {
                    vring.stop().await;
                }
            }
            _ if vring.is_running() => return Err(invalid("a running queue cannot be changed")),
            code::SET_VRING_NUM if value > most || !value.is_power_of_two() => {
                return Err(invalid("the queue size is too large or not a power of two"));
            }
            code::SET_VRING_NUM => vring.size = value,
            _ => {
                vring.base = u16::try_from(value)
                    .map_err(|_| invalid("the index does not fit in 16 bits"))?;
            }
        }
        self.start(index as usize)
    }

    async fn set_addresses(&mut self, at: VringAddress) -> io::Result<Reply> {
        if at.flags != 0 {
            return Err(invalid("logging of the used ring was not offered"));
        }
        let vring = self.vring(at.index)?;
        vring.stop().await;
        vring.addresses =
            Addresses { descriptors: at.descriptors, available: at.available, used: at.used };
        self.start(at.index as usize)
    }

    async fn set_notifier(&mut self, mut message: Message) -> io::Result<Reply> {
        let value: u64 = message.read()?;
        let index = (value & VRING_INDEX) as u32;
        let file = if value & NO_DESCRIPTOR == 0 { Some(message.file()?) } else { None };
        file.as_ref().map_or(Ok(()), check_eventfd)?;
        let vring = self.vring(index)?;
        match message.code {
            code::SET_VRING_KICK => {
                let file: Option<OwnedFd> = file;
                let kick = file.ok_or_else(|| invalid("the queue has no kick eventfd"))?;
                vring.stop().await;
                vring.kick = Some(kick);
                return self.start(index as usize);
            }
            code::SET_VRING_CALL => {
                vring.call.set(file)?;
                if vring.is_running() {
                    // A notification to the previous eventfd may have been lost.
                    vring.call.notify();
                }
            }
            _ => vring.error.set(file)?,
        }
        Ok(Reply::Done)
    }

    /// Starts a queue if it is ready.
    fn start(&mut self, index: usize) -> io::Result<Reply> {
        let common = self.common();
        let Some(vring) = self.vrings.get_mut(index) else { return Ok(Reply::Done) };
        if vring.is_ready() {
            let list = self.in_flight.as_ref().map(|region| region.queue(index as u16));
            vring.start(&common, list.transpose().map_err(io::Error::other)?)?;
        }
        Ok(Reply::Done)
    }

    fn common(&self) -> Common<D> {
        let Served { device, bounces, options, .. } = self.served;
        let mut serial = [0; ID_BYTES];
        for (place, byte) in serial.iter_mut().zip(options.serial.bytes()) {
            *place = byte;
        }
        Common {
            device: device.clone(),
            bounces: bounces.clone(),
            memory: self.memory.clone(),
            event_index: self.features & EVENT_INDEX != 0,
            write_through: options.write_through || self.features & FLUSH == 0,
            read_only: config::is_read_only(&**device, options),
            serial,
            poll: options.poll,
            lost: self.lost.clone(),
        }
    }

    /// Stops the running queues, and returns their indices.
    async fn pause(&mut self) -> Vec<usize> {
        let vrings = self.vrings.iter().enumerate();
        let running = vrings.filter(|(_, vring)| vring.is_running()).map(|(at, _)| at).collect();
        self.stop_all().await;
        running
    }

    fn resume(&mut self, running: &[usize]) -> io::Result<Reply> {
        running.iter().try_for_each(|index| self.start(*index).map(drop))?;
        Ok(Reply::Done)
    }

    async fn stop_all(&mut self) {
        self.vrings.iter().for_each(Vring::request_stop);
        for vring in &mut self.vrings {
            vring.stop().await;
        }
    }

    /// Forgets the requests that a paused disk has left in the list of those in flight. A client that only stops the
    /// device, as QEMU does with its machine, keeps them, and sends the list again.
    fn forget_in_flight(&self) {
        let Some(region) = &self.in_flight else { return };
        for index in 0..self.vrings.len() {
            if let Ok(mut list) = region.queue(index as u16) {
                list.forget();
            }
        }
    }

    /// Stops and disables all queues, and resets their settings.
    async fn reset(&mut self) {
        self.stop_all().await;
        self.status = 0;
        for vring in &mut self.vrings {
            vring.kick = None;
            vring.base = 0;
            vring.enabled = self.features & PROTOCOL_FEATURES == 0;
        }
    }
}

impl From<MemoryRegion> for RegionAt {
    fn from(MemoryRegion { guest, size, user, offset }: MemoryRegion) -> Self {
        Self { guest, size, user, offset }
    }
}

/// The region in a message about a single one; it follows 8 bytes of padding.
fn single_region(message: &Message) -> io::Result<(u64, MemoryRegion)> {
    let (padding, rest) = message.read_prefix()?;
    let region = zerocopy::FromBytes::read_from_bytes(rest);
    Ok((padding, region.map_err(|_| invalid("the memory region has the wrong length"))?))
}

/// A client's description of the list of requests in flight; some clients omit the padding.
fn in_flight_area(message: &mut Message) -> io::Result<InFlightArea> {
    if message.body.len() == size_of::<InFlightArea>() - size_of::<u32>() {
        message.body.resize(size_of::<InFlightArea>(), 0);
    }
    message.read()
}
