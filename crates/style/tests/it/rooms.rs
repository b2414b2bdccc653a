//! The modules of a crate use each other in one direction: no circle of imports among those beside one another, at any
//! depth. What a module uses of the modules around it does not count, nor does what it uses of its own.

use proc_macro2::{TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::punctuated::Punctuated;
use syn::visit::{Visit, visit_file};
use syn::{
    Attribute, Expr, ExprLit, File, Item, ItemMod, ItemUse, Lit, Macro, Meta, Token, UseTree,
    Visibility,
};

/// A module, or what is in one: its names from the crate's root.
type Name = Vec<String>;

/// Who imports whom, of the modules in one.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// What the source of a module says.
#[derive(Default)]
struct Module {
    /// The names that `use` brings into it, each with what it stands for.
    names: BTreeMap<String, Name>,
    /// The modules whose names are all brought into it.
    globs: Vec<Name>,
    /// The paths in it.
    paths: Vec<Name>,
    /// What it defines.
    items: BTreeSet<String>,
}

type Modules = BTreeMap<Name, Module>;

pub(super) fn is_test(attributes: &[Attribute]) -> bool {
    attributes
        .iter()
        .filter(|attribute| attribute.path().is_ident("cfg"))
        .any(|attribute| attribute.parse_args().is_ok_and(|condition| needs_tests(&condition)))
}

/// Whether a condition of `cfg` holds in tests alone.
fn needs_tests(condition: &Meta) -> bool {
    let Meta::List(list) = condition else { return condition.path().is_ident("test") };
    let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    let parts: Vec<Meta> = parts.into_iter().flatten().collect();
    (list.path.is_ident("all") && parts.iter().any(needs_tests))
        || (list.path.is_ident("any") && parts.iter().all(needs_tests))
}

fn joined(base: &[String], name: &str) -> Name {
    base.iter().cloned().chain([name.to_owned()]).collect()
}

/// Reads a crate's modules, from the file of its root on. Tests are left out.
fn read(file: &Path, directory: &Path, name: &[String], modules: &mut Modules) {
    let source = fs::read_to_string(file).unwrap_or_else(|_| panic!("{}", file.display()));
    let parsed = syn::parse_file(&source).unwrap_or_else(|_| panic!("{}", file.display()));
    for Elsewhere { child, beside, path } in collect(&parsed, name, modules) {
        let name: Name = name.iter().chain(&beside).cloned().collect();
        if let Some(path) = path {
            let file = file.with_file_name(path);
            let directory = file.parent().unwrap_or(directory).to_owned();
            read(&file, &directory, &joined(&name, &child), modules);
            continue;
        }
        let directory = beside.iter().fold(directory.to_owned(), |path, name| path.join(name));
        let alone = directory.join(format!("{child}.rs"));
        let file = if alone.exists() { alone } else { directory.join(&child).join("mod.rs") };
        read(&file, &directory.join(&child), &joined(&name, &child), modules);
    }
}

/// A module in another file.
struct Elsewhere {
    child: String,
    /// The modules within this file that it is in.
    beside: Name,
    /// The file, if it is named.
    path: Option<String>,
}

/// Adds a file's module, and those within it. Returns those in other files.
fn collect(parsed: &File, name: &[String], modules: &mut Modules) -> Vec<Elsewhere> {
    let mut collector =
        Collector { modules, name: name.to_vec(), depth: name.len(), elsewhere: Vec::new() };
    collector.modules.entry(name.to_vec()).or_default();
    visit_file(&mut collector, parsed);
    collector.elsewhere
}

struct Collector<'a> {
    modules: &'a mut Modules,
    name: Name,
    /// The depth of the file's own module.
    depth: usize,
    elsewhere: Vec<Elsewhere>,
}

impl Collector<'_> {
    fn own(&mut self) -> &mut Module {
        self.modules.entry(self.name.clone()).or_default()
    }

    fn add_use(&mut self, tree: &UseTree, mut path: Name) {
        match tree {
            UseTree::Path(of) => {
                path.push(of.ident.to_string());
                self.add_use(&of.tree, path);
            }
            UseTree::Name(last) => {
                if last.ident != "self" {
                    path.push(last.ident.to_string());
                }
                let name = path.last().cloned().unwrap_or_default();
                self.add_name(name, path);
            }
            UseTree::Rename(last) => {
                if last.ident != "self" {
                    path.push(last.ident.to_string());
                }
                self.add_name(last.rename.to_string(), path);
            }
            UseTree::Glob(_) => self.own().globs.push(path),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_use(tree, path.clone()));
            }
        }
    }

    fn add_name(&mut self, name: String, path: Name) {
        // Another may have the same name, elsewhere in the module.
        self.own().paths.push(path.clone());
        self.own().names.insert(name, path);
    }

    /// Paths in the arguments of a macro, which are not parsed.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path = Name::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.own().paths.push(std::mem::take(&mut path));
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Group(group) => {
                    self.add_tokens(group.stream());
                    colons = 0;
                }
                _ => colons = 0,
            }
        }
        self.own().paths.push(path);
    }
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let (attributes, name) = match item {
            Item::Const(item) => (&item.attrs, Some(&item.ident)),
            Item::Enum(item) => (&item.attrs, Some(&item.ident)),
            Item::Fn(item) => (&item.attrs, Some(&item.sig.ident)),
            Item::Impl(item) => (&item.attrs, None),
            Item::Mod(item) => (&item.attrs, None),
            Item::Static(item) => (&item.attrs, Some(&item.ident)),
            Item::Struct(item) => (&item.attrs, Some(&item.ident)),
            Item::Trait(item) => (&item.attrs, Some(&item.ident)),
            Item::Type(item) => (&item.attrs, Some(&item.ident)),
            Item::Union(item) => (&item.attrs, Some(&item.ident)),
            Item::Use(item) => (&item.attrs, None),
            _ => (&Vec::new(), None),
        };
        if !is_test(attributes) {
            self.own().items.extend(name.map(ToString::to_string));
            syn::visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        let child = item.ident.to_string();
        let Some((_, items)) = &item.content else {
            let beside = self.name[self.depth..].to_vec();
            let path = item.attrs.iter().find_map(|attribute| match &attribute.meta {
                Meta::NameValue(meta) if meta.path.is_ident("path") => match &meta.value {
                    Expr::Lit(ExprLit { lit: Lit::Str(path), .. }) => Some(path.value()),
                    _ => None,
                },
                _ => None,
            });
            self.elsewhere.push(Elsewhere { child, beside, path });
            return;
        };
        self.name.push(child);
        self.own();
        for item in items {
            self.visit_item(item);
        }
        self.name.pop();
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        self.add_use(&item.tree, Name::new());
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path.segments.iter().map(|segment| segment.ident.to_string());
        let names = names.collect();
        self.own().paths.push(names);
        syn::visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, of: &'ast Macro) {
        syn::visit::visit_macro(self, of);
        self.add_tokens(of.tokens.clone());
    }

    /// `pub(in …)` names a module around it.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// The module of a path in `module`: the one that defines what the path names, through any re-exports; if that is
/// another crate, the one that re-exports it. `None` if the path itself is of another crate.
fn resolve(modules: &Modules, module: &[String], path: &[String], hops: u32) -> Option<Name> {
    let (first, rest) = path.split_first()?;
    let base = match &**first {
        "crate" => &[],
        "self" => module,
        "super" => module.split_last()?.1,
        _ => return find(modules, module, path, hops),
    };
    match rest.first().map(|next| &**next) {
        Some("super" | "self") => resolve(modules, base, rest, hops),
        _ => Some(find(modules, base, rest, hops).unwrap_or_else(|| base.to_vec())),
    }
}

/// The module of what `path` is in `module`; `None` if that has no such name.
fn find(modules: &Modules, module: &[String], path: &[String], hops: u32) -> Option<Name> {
    let (name, rest) = path.split_first()?;
    let hops = hops.checked_sub(1)?;
    let own = &modules[module];
    let child = joined(module, name);
    if modules.contains_key(&child) {
        return Some(find(modules, &child, rest, hops).unwrap_or(child));
    }
    if let Some(stands_for) = own.names.get(name).filter(|stands_for| stands_for[..] != *path) {
        let path: Name = stands_for.iter().chain(rest).cloned().collect();
        return Some(resolve(modules, module, &path, hops).unwrap_or_else(|| module.to_vec()));
    }
    if own.items.contains(name) {
        return Some(module.to_vec());
    }
    own.globs.iter().find_map(|glob| {
        let glob = resolve(modules, module, glob, hops)?;
        find(modules, &glob, path, hops)
    })
}

/// For each module, who imports whom of the modules in it.
fn imports(modules: &Modules) -> BTreeMap<Name, Imports> {
    let mut found: BTreeMap<Name, Imports> = BTreeMap::new();
    for (name, module) in modules {
        for path in module.paths.iter().chain(&module.globs) {
            let Some(used) = resolve(modules, name, path, 16) else { continue };
            let common = name.iter().zip(&used).take_while(|(one, other)| one == other).count();
            if let (Some(from), Some(to)) = (name.get(common), used.get(common)) {
                let imports = found.entry(name[..common].to_vec()).or_default();
                imports.entry(from.clone()).or_default().insert(to.clone());
            }
        }
    }
    found
}

/// Takes away what imports nothing that is left, or is imported by nothing that is left, again and again. What stays is
/// in circles, or between them.
fn circles(mut imports: Imports) -> Imports {
    loop {
        let before = imports.len();
        let left: BTreeSet<String> = imports.keys().cloned().collect();
        let imported: BTreeSet<String> = imports.values().flatten().cloned().collect();
        imports.retain(|name, others| {
            others.retain(|other| left.contains(other));
            !others.is_empty() && imported.contains(name)
        });
        if imports.len() == before {
            return imports;
        }
    }
}

/// The files of the roots of crates: of libraries, and of programs.
fn roots(source: &Path) -> Vec<PathBuf> {
    let programs = fs::read_dir(source.join("bin")).into_iter().flatten();
    let programs = programs.map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let roots = ["lib.rs", "main.rs"].map(|root| source.join(root));
    roots.into_iter().filter(|path| path.exists()).chain(programs).collect()
}

#[test]
fn imports_have_one_direction() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut checked, mut wrong) = (0, Vec::new());
    let others = ["fuzz", "bench/load"].map(|other| crates.parent().unwrap().join(other));
    let crates = fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path());
    for root in crates.chain(others).flat_map(|package| roots(&package.join("src"))) {
        let mut modules = Modules::new();
        read(&root, root.parent().unwrap(), &[], &mut modules);
        for (within, imports) in imports(&modules) {
            checked += imports.values().map(BTreeSet::len).sum::<usize>();
            let circles = circles(imports);
            if !circles.is_empty() {
                let within = within.join("::");
                wrong.push(format!("{} in '{within}': {circles:?}", root.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(checked > 1000, "{checked}");
}

#[test]
fn a_circle_is_found_whatever_hides_it() {
    let found = |sources: &[(&str, &str)]| {
        let mut modules = Modules::new();
        for (name, source) in sources {
            let name: Name =
                name.split("::").filter(|n| !n.is_empty()).map(str::to_owned).collect();
            collect(&syn::parse_file(source).unwrap(), &name, &mut modules);
        }
        let circles = imports(&modules).into_values().map(circles).filter(|c| !c.is_empty());
        circles.map(|circles| circles.len()).collect::<Vec<_>>()
    };
    let root = ("", "mod a; mod b; mod c; pub use b::B; #[cfg(test)] mod t { use crate::a; }");
    let circle = |a: &str, b: &str| found(&[root, ("a", a), ("b", b), ("c", "use crate::a::A;")]);
    assert_eq!(circle("use crate::b::B;", "pub struct B;"), [0; 0]);
    assert_eq!(circle("use crate::b::B;", "use super::a::A;"), [2]);
    assert_eq!(circle("use crate::B;", "use super::{a::A};"), [2], "through a re-export");
    assert_eq!(circle("use super::*; fn f(b: B) {}", "use crate::a;"), [2], "by all names");
    assert_eq!(circle("use crate::B as O;", "fn f() { vec![crate::a::A] }"), [2], "in a macro");
    assert_eq!(circle("fn f(b: super::b::B) {}", "use crate::{c::C};"), [3], "by way of another");
    assert_eq!(circle("use crate::b;", "pub(in crate::a) struct B;"), [0; 0], "not an import");
    assert_eq!(circle("use crate::b;", "#[cfg(test)] mod t { use crate::a; }"), [0; 0], "tests");
    let not = "#[cfg(not(test))] mod t { use crate::a; }";
    assert_eq!(circle("use crate::b;", not), [2], "not in tests");
    let again = "fn f() { use crate::a::A as X; } use std::fmt as X;";
    assert_eq!(circle("use crate::b;", again), [2], "by a name that another has");
    let outside = "pub use other::Thing; use crate::a::A;";
    assert_eq!(circle("use crate::b::Thing;", outside), [2], "what another crate has");
    for b in ["use crate::a; pub use o::B;", "use crate::a; pub struct B;"] {
        let all = [("", "mod a; mod b; pub use b::*;"), ("a", "use crate::B;"), ("b", b)];
        assert_eq!(found(&all), [2], "through a re-export of all names");
    }
    let inner = [("a", "mod x; mod y;"), ("a::x", "use super::y;"), ("a::y", "use crate::a::x;")];
    assert_eq!(found(&[&[root, ("b", ""), ("c", "")], &inner[..]].concat()), [2], "further down");
}
