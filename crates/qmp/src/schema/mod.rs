//! The arguments and results of commands, in one table, used to check arguments and to answer `query-qmp-schema`.
//!
//! The types are those of QEMU's QAPI: arguments accepted here are accepted by QEMU as well, unless their documentation
//! says that they are Isobath's own.

mod check;
mod introspect;
mod text;

pub use check::check;
pub use introspect::introspect;
pub use text::from_text;

/// The type of a value.
#[derive(Clone, Copy, Debug)]
pub enum Type {
    /// A string.
    Str,
    /// A signed 64-bit integer.
    Int,
    /// An integer from 0 to 2^64 - 1.
    Size,
    /// Any number.
    Number,
    /// `true` or `false`.
    Bool,
    /// `null`.
    Null,
    /// Anything.
    Any,
    /// One of several strings.
    Enum(&'static [&'static str]),
    /// An object.
    Object(&'static Object),
    /// A value of one of several types, distinguished by their JSON types.
    Alternate(&'static Alternate),
    /// An array.
    List(&'static Type),
}

/// The type of an object: its members, and those that depend on one of them (QAPI's flat union).
#[derive(Debug)]
pub struct Object {
    /// Members that every such object may have.
    pub members: &'static [Member],
    /// Further members, depending on the value of one of them.
    pub variants: Option<Variants>,
}

/// The members that depend on another's value.
#[derive(Debug)]
pub struct Variants {
    /// The name of that member; its type is an enumeration of the cases.
    pub tag: &'static str,
    /// The members that each of its values adds; values that are not listed add none.
    pub cases: &'static [(&'static str, &'static Object)],
}

/// A member of an object, or an argument of a command.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub ty: Type,
    /// Whether it may be left out.
    pub optional: bool,
}

/// Several types for one value.
#[derive(Debug)]
pub struct Alternate {
    /// QEMU's name for it, used in messages.
    pub name: &'static str,
    /// The types; no two have the same JSON type.
    pub types: &'static [Type],
}

/// A command.
#[derive(Debug)]
pub struct Command {
    /// Its name.
    pub name: &'static str,
    /// Its arguments.
    pub arguments: &'static Object,
    /// The type of its result; `None` is an empty object.
    pub returns: Option<Type>,
}

/// An event.
#[derive(Debug)]
pub struct EventType {
    /// Its name.
    pub name: &'static str,
    /// Its data.
    pub data: &'static Object,
}

/// All commands and events of a server.
#[derive(Debug)]
pub struct Schema {
    /// The commands.
    pub commands: &'static [&'static [Command]],
    /// The events.
    pub events: &'static [EventType],
}

impl Schema {
    /// Every command.
    pub fn commands(&self) -> impl Iterator<Item = &'static Command> {
        self.commands.iter().copied().flatten()
    }

    /// The command with this name.
    pub fn command(&self, name: &str) -> Option<&'static Command> {
        self.commands().find(|command| command.name == name)
    }
}

/// An object without members.
pub static EMPTY: Object = object(&[]);

/// An object type without variants.
pub const fn object(members: &'static [Member]) -> Object {
    Object { members, variants: None }
}

/// A required member.
pub const fn req(name: &'static str, ty: Type) -> Member {
    Member { name, ty, optional: false }
}

/// An optional member.
pub const fn opt(name: &'static str, ty: Type) -> Member {
    Member { name, ty, optional: true }
}

/// The name of a member of the object at `path`, for messages.
fn below(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
