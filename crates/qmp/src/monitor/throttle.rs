//! Limits on the requests of disks: setting them, showing them, and letting requests pass.

use super::arguments::{Arguments, integer, optional_text, text};
use super::image::format_of;
use super::snapshot::check_root;
use super::{Drive, Monitor, Result};
use crate::error::{ErrorClass, QmpError};
use isobath_disk::throttle::{Group, LimitKind, Limits, Throttle};
use isobath_storage::Host;
use serde_json::{Map, Value};
use std::rc::{Rc, Weak};
use std::sync::Arc;

/// A node of the driver `throttle`: another name of a disk, whose requests it limits.
pub(super) struct Filter<H: Host> {
    name: String,
    of: Weak<Drive<H>>,
    /// The node that was described within it, and goes with it.
    own: Option<String>,
}

/// What a limit of this kind is called in `block_set_io_throttle` and in `BlockDeviceInfo`.
const fn name(kind: LimitKind) -> &'static str {
    match kind {
        LimitKind::BpsTotal => "bps",
        LimitKind::BpsRead => "bps_rd",
        LimitKind::BpsWrite => "bps_wr",
        LimitKind::IopsTotal => "iops",
        LimitKind::IopsRead => "iops_rd",
        LimitKind::IopsWrite => "iops_wr",
    }
}

/// A number that must not be negative; `None` if it is not given.
fn number(arguments: &Arguments, name: &str) -> Result<Option<u64>> {
    let number = integer(arguments, name).map(u64::try_from).transpose();
    number.map_err(|_| QmpError::new(format_args!("Parameter '{name}' must not be negative")))
}

/// The limits in the arguments of `block_set_io_throttle`.
fn limits_of(arguments: &Arguments) -> Result<Limits> {
    let mut limits = Limits::default();
    for kind in LimitKind::ALL {
        let name = name(kind);
        let mut limit = limits.get(kind);
        limit.average = number(arguments, name)?.unwrap_or(limit.average);
        limit.burst = number(arguments, &format!("{name}_max"))?.unwrap_or(limit.burst);
        let length = number(arguments, &format!("{name}_max_length"))?;
        limit.burst_length = length.unwrap_or(limit.burst_length);
        limits.set(kind, limit);
    }
    limits.iops_size = number(arguments, "iops_size")?.unwrap_or(0);
    limits.check().map_err(QmpError::new)?;
    Ok(limits)
}

/// The limits of a `throttle-group` object.
fn limits_of_object(arguments: &Arguments) -> Result<Limits> {
    let mut limits = Limits::default();
    let none = Map::new();
    let inner = arguments.get("limits").and_then(Value::as_object).unwrap_or(&none);
    let old = arguments.keys().filter_map(|name| Some((arguments, name, name.strip_prefix("x-")?)));
    for (values, name, limit) in old.chain(inner.keys().map(|name| (inner, name, &**name))) {
        if let Some(value) = number(values, name)?
            && !limits.set_by_name(limit, value)
        {
            return Err(QmpError::new(format_args!("Parameter '{name}' is unexpected")));
        }
    }
    limits.check().map_err(QmpError::new)?;
    Ok(limits)
}

/// Adds a disk's limits to QEMU's `BlockDeviceInfo`.
pub(super) fn describe(throttle: &Throttle, info: &mut Map<String, Value>) {
    let Some(group) = throttle.group() else { return };
    let limits = group.limits();
    for kind in LimitKind::ALL {
        let (name, limit) = (name(kind), limits.get(kind));
        info.insert(name.to_owned(), limit.average.into());
        if limit.burst > 0 {
            info.insert(format!("{name}_max"), limit.burst.into());
            info.insert(format!("{name}_max_length"), limit.burst_length.into());
        }
    }
    if limits.iops_size > 0 {
        info.insert("iops_size".into(), limits.iops_size.into());
    }
    info.insert("group".into(), group.name().into());
}

impl<H: Host + Clone> Monitor<H> {
    /// Limits a disk's requests, as QEMU's `block_set_io_throttle` does: with those of the other disks in its group.
    /// The group is the one named here, the one that it is in, or one named like the disk. No limits take it out of its
    /// group.
    ///
    /// # Errors
    /// If the limits contradict each other.
    pub fn limit(&self, drive: &Drive<H>, group: Option<&str>, limits: &Limits) -> Result<()> {
        limits.check().map_err(QmpError::new)?;
        let throttle = drive.disk().throttle();
        if !limits.is_enabled() {
            throttle.set_group(None);
            return Ok(());
        }
        let current = throttle.group();
        let group = match (group, &current) {
            (Some(name), _) => self.throttle_groups.get(name),
            (None, Some(group)) => Arc::clone(group),
            (None, None) => self.throttle_groups.get(&self.name_of(drive)),
        };
        group.set_limits(limits);
        join(throttle, &group);
        Ok(())
    }

    /// Puts a disk into a group that has limits already.
    ///
    /// # Errors
    /// If there is no such group.
    pub fn join_group(&self, drive: &Drive<H>, group: &str) -> Result<()> {
        let found = self.throttle_groups.find(group);
        let found = found.ok_or_else(|| {
            QmpError::new(format_args!("Throttle group '{group}' does not exist"))
        })?;
        join(drive.disk().throttle(), &found);
        Ok(())
    }

    /// Lets the requests of all disks pass without waiting for their limits, from now on: the server ends.
    pub fn let_pass(&self) {
        let drained = self.drives().iter().map(|drive| drive.disk().throttle().drain()).collect();
        *self.drained.borrow_mut() = drained;
    }

    pub(super) fn set_io_throttle(&self, arguments: &Arguments) -> Result<()> {
        let drive = match (optional_text(arguments, "device"), optional_text(arguments, "id")) {
            (Some(device), None) => self.find_device(device).ok_or(device),
            (None, Some(id)) => self.find_disk(id).ok_or(id),
            _ => return Err(QmpError::new("Need exactly one of 'device' and 'id'")),
        };
        let drive = drive.map_err(|name| {
            QmpError::of(ErrorClass::DeviceNotFound, format_args!("Device '{name}' not found"))
        })?;
        self.check_no_filter(&drive)?;
        self.limit(&drive, optional_text(arguments, "group"), &limits_of(arguments)?)
    }

    /// A disk, by its device or its root node.
    pub(super) fn find_disk(&self, name: &str) -> Option<Rc<Drive<H>>> {
        let by_node = || self.find_node(name).filter(|found| found.depth == 0);
        self.find_device(name).or_else(|| by_node().map(|found| found.drive))
    }

    /// The disk that a node of the driver `throttle` limits.
    pub(super) fn limited_by(&self, name: &str) -> Option<Rc<Drive<H>>> {
        let filters = self.filters.borrow();
        let filter = filters.iter().find(|filter| filter.name == name)?;
        let drive = filter.of.upgrade()?;
        self.drives.borrow().iter().any(|known| Rc::ptr_eq(known, &drive)).then_some(drive)
    }

    /// Forgets the nodes that limit a disk, which is removed.
    pub(super) fn forget_filters(&self, drive: &Rc<Drive<H>>) {
        self.filters.borrow_mut().retain(|filter| filter.of.as_ptr() != Rc::as_ptr(drive));
    }

    /// The name of the node that limits a disk.
    pub(super) fn filter_of(&self, drive: &Rc<Drive<H>>) -> Option<String> {
        let filters = self.filters.borrow();
        let filter = filters.iter().find(|filter| filter.of.as_ptr() == Rc::as_ptr(drive));
        filter.map(|filter| filter.name.clone())
    }

    /// Rejects a disk that a node of the driver `throttle` limits: its limits are the group's. In QEMU a node below
    /// another one is no device.
    fn check_no_filter(&self, drive: &Rc<Drive<H>>) -> Result<()> {
        let Some(filter) = self.filter_of(drive) else { return Ok(()) };
        let name = self.name_of(drive);
        let class = if drive.device().is_empty() {
            ErrorClass::DeviceNotFound
        } else {
            ErrorClass::GenericError
        };
        Err(QmpError::of(
            class,
            format_args!(
                "the requests to '{name}' are limited by node '{filter}' and its throttle group; \
                 delete that node first"
            ),
        ))
    }

    /// Adds a node of the driver `throttle`.
    pub(super) async fn add_filter(&self, name: &str, arguments: &Arguments) -> Result<()> {
        let group = text(arguments, "throttle-group");
        let no_group = || QmpError::new(format_args!("Throttle group '{group}' does not exist"));
        self.throttle_groups.find(group).ok_or_else(no_group)?;
        let (node, is_own) = match arguments.get("file") {
            Some(Value::String(node)) => (node.clone(), false),
            Some(Value::Object(options)) => (self.add_below(name, options).await?, true),
            _ => return Err(QmpError::new("Parameter 'file' is missing")),
        };
        let found = self.look_up("", &node)?;
        check_root(&found)?;
        let drive = found.drive;
        if let Some(other) = self.filter_of(&drive) {
            return Err(QmpError::new(format_args!(
                "the requests to '{node}' are limited by node '{other}' already; delete it first"
            )));
        }
        if let Some(limited) = drive.disk().throttle().group() {
            return Err(QmpError::new(format_args!(
                "the requests to '{node}' are limited already, in the group '{}'; lift these limits first, with \
                 block_set_io_throttle",
                limited.name()
            )));
        }
        self.join_group(&drive, group)?;
        let (name, of) = (name.to_owned(), Rc::downgrade(&drive));
        let mut filters = self.filters.borrow_mut();
        filters.retain(|filter| filter.of.strong_count() > 0);
        filters.push(Filter { name, of, own: is_own.then_some(node) });
        Ok(())
    }

    /// Adds the node that a filter describes inline. Returns its name: the filter's, unless it has one.
    async fn add_below(&self, filter: &str, options: &Arguments) -> Result<String> {
        let driver = text(options, "driver");
        if format_of(driver).is_none() {
            return Err(QmpError::new(format_args!(
                "driver '{driver}' cannot be below 'throttle'; use 'qcow2', 'raw' or 'luks'"
            )));
        }
        let name = optional_text(options, "node-name").unwrap_or(filter).to_owned();
        let mut options = options.clone();
        options.insert("node-name".into(), name.clone().into());
        Box::pin(self.blockdev_add(options)).await?;
        Ok(name)
    }

    /// The node that was described within a node of the driver `throttle`.
    fn own_node(&self, filter: &str) -> Option<String> {
        let filters = self.filters.borrow();
        filters.iter().find(|other| other.name == filter)?.own.clone()
    }

    /// The node of the driver `throttle` that must be deleted before the root node of a disk. One that has its own node
    /// is deleted with it once other images are above that.
    pub(super) fn filter_above(&self, drive: &Rc<Drive<H>>) -> Option<String> {
        let filter = self.filter_of(drive)?;
        let is_below_others =
            self.own_node(&filter).is_some_and(|own| own != self.root_name(drive));
        (!is_below_others).then_some(filter)
    }

    /// Removes a node of the driver `throttle`, and the disk's limits; or the disk, if it was described within it.
    pub(super) async fn remove_filter(&self, name: &str, drive: &Rc<Drive<H>>) -> Result<()> {
        let in_use = |by: &str| Err(QmpError::new(format_args!("Node {name} is in use: {by}")));
        if let Some(export) = self.export_of(drive) {
            return in_use(&format!("it is exported as '{export}'"));
        }
        let own = self.own_node(name);
        let root = self.root_name(drive);
        if own.as_ref().is_some_and(|own| *own != root) {
            return in_use(&format!("it limits the requests to node '{root}'; delete that one"));
        }
        if own.is_some() {
            return self.remove_disk(drive).await;
        }
        drive.disk().throttle().set_group(None);
        self.filters.borrow_mut().retain(|filter| filter.name != name);
        Ok(())
    }

    pub(super) fn add_throttle_group(&self, arguments: &Arguments) -> Result<()> {
        let id = text(arguments, "id");
        let limits = limits_of_object(arguments)?;
        if self.throttle_groups.find(id).is_some() {
            return Err(QmpError::new(format_args!(
                "A throttle group named '{id}' already exists"
            )));
        }
        let group = self.throttle_groups.get(id);
        group.set_limits(&limits);
        self.throttle_objects.borrow_mut().insert(id.to_owned(), group);
        Ok(())
    }

    /// Removes a `throttle-group` object; `None` if there is none of this name.
    pub(super) fn remove_throttle_group(&self, id: &str) -> Option<Result<()>> {
        let mut objects = self.throttle_objects.borrow_mut();
        let group = objects.get(id)?;
        let is_member = |drive: &Rc<Drive<H>>| {
            drive.disk().throttle().group().is_some_and(|other| Arc::ptr_eq(&other, group))
        };
        if self.drives().iter().any(is_member) {
            return Some(Err(QmpError::new(format_args!(
                "object '{id}' is in use, can not be deleted"
            ))));
        }
        objects.remove(id);
        Some(Ok(()))
    }
}

/// Puts a disk into a group unless it is there: its requests keep their turns.
fn join(throttle: &Throttle, group: &Arc<Group>) {
    if !throttle.group().is_some_and(|current| Arc::ptr_eq(&current, group)) {
        throttle.set_group(Some(Arc::clone(group)));
    }
}
