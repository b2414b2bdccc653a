//! What cannot happen is checked: so many invariants in each crate to which people trust their data, so many of them of
//! two states, and so many that a test reaches.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::visit::{self, Visit};
use syn::{
    BinOp, Expr, ExprCall, ExprIf, ExprMatch, ExprMethodCall, ImplItemFn, ItemConst, ItemFn,
    ItemImpl, ItemMod, Lit, Local, Pat, UnOp,
};

/// What is demanded of a crate. The last two only grow.
struct Demand {
    name: &'static str,
    /// Checks in 1,000 lines of code.
    density: usize,
    /// Per cent of the checks that relate two states.
    relating: usize,
    /// Per cent of the checks' messages that a test names.
    named: usize,
}

const DEMANDS: [Demand; 4] = [
    Demand { name: "image", density: 10, relating: 57, named: 100 },
    Demand { name: "disk", density: 10, relating: 62, named: 100 },
    Demand { name: "chain", density: 5, relating: 73, named: 100 },
    Demand { name: "jobs", density: 5, relating: 50, named: 100 },
];

/// The functions that check an invariant.
const CHECKS: [&str; 3] = ["violated", "invariant", "always"];

/// Methods that look a value up in another, take it away from another, or put it where there is room.
const LOOKUPS: [&str; 13] = [
    "binary_search",
    "checked_sub",
    "contains",
    "contains_key",
    "get",
    "get_mut",
    "is_in",
    "range",
    "remove",
    "room",
    "set",
    "starts_with",
    "strip_prefix",
];

/// Crates with tests of the whole engine, which may name a check of any crate.
const TESTS_OF_ALL: [&str; 3] = ["isobath", "crash", "cli"];

/// A test names a message by so many words of it in one string, which are in no other message.
const WORDS: usize = 3;

/// A call that checks an invariant.
struct Check {
    message: String,
    /// It relates two states: what it tests compares two values, neither of which is a constant, or looks one up in the
    /// other. Where it tests a local name, that stands for what was assigned to it.
    relates: bool,
}

/// The Rust files below a directory.
fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// A crate as far as it matters here.
#[derive(Default)]
struct Source {
    checks: Vec<Check>,
    /// Lines of code, without tests, comments and empty lines.
    lines: usize,
    /// The strings in its tests.
    strings: BTreeSet<String>,
}

impl Source {
    fn read(directory: &Path) -> Self {
        let mut source = Self::default();
        let mut files = Vec::new();
        sources(&directory.join("src"), &mut files);
        for file in &files {
            let text = fs::read_to_string(file).unwrap();
            let tokens: TokenStream = text.parse().unwrap();
            if is_of_tests(file) {
                strings(tokens, &mut source.strings);
                continue;
            }
            source.lines += lines(&text);
            strings(of_tests(tokens), &mut source.strings);
            source.checks.extend(checks(&text));
        }
        source.add_tests(directory);
        source
    }

    fn add_tests(&mut self, directory: &Path) {
        let mut files = Vec::new();
        sources(&directory.join("tests"), &mut files);
        for file in files {
            strings(fs::read_to_string(file).unwrap().parse().unwrap(), &mut self.strings);
        }
    }
}

/// Whether a file in `src` is one of tests alone.
fn is_of_tests(file: &Path) -> bool {
    let name = file.file_stem().unwrap().to_string_lossy();
    ["broken", "testing", "tests"].contains(&&*name) || name.ends_with("_tests")
}

/// Lines of code in a source without its tests, which are the last of a file.
fn lines(text: &str) -> usize {
    let mut count = 0;
    let mut code = text.lines().map(str::trim).peekable();
    while let Some(line) = code.next() {
        let of_tests = line.starts_with("#[cfg(") && line.contains("test");
        if of_tests
            && code.peek().is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'))
        {
            break;
        }
        count += usize::from(!line.is_empty() && !line.starts_with("//"));
    }
    count
}

/// What belongs to tests in a source: the item behind each `#[cfg(test)]`.
fn of_tests(tokens: TokenStream) -> TokenStream {
    let mut found = TokenStream::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match &token {
            TokenTree::Punct(hash) if hash.as_char() == '#' => {
                let Some(TokenTree::Group(attribute)) = tokens.peek() else { continue };
                let attribute = attribute.stream().to_string();
                if !attribute.starts_with("cfg") || !attribute.contains("test") {
                    continue;
                }
                for token in tokens.by_ref() {
                    let ends = match &token {
                        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                        TokenTree::Punct(punct) => punct.as_char() == ';',
                        _ => false,
                    };
                    found.extend([token]);
                    if ends {
                        break;
                    }
                }
            }
            TokenTree::Group(group) => found.extend(of_tests(group.stream())),
            _ => {}
        }
    }
    found
}

/// The strings in a source.
fn strings(tokens: TokenStream, found: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Group(group) => strings(group.stream(), found),
            TokenTree::Literal(literal) => {
                if let Lit::Str(text) = Lit::new(literal) {
                    found.insert(text.value());
                }
            }
            _ => {}
        }
    }
}

/// The checks in a source, without those in its tests.
fn checks(text: &str) -> Vec<Check> {
    let file = syn::parse_file(text).unwrap();
    let mut constants = Constants(BTreeMap::new());
    constants.visit_file(&file);
    let mut finder = Finder { constants: constants.0, ..Finder::default() };
    finder.visit_file(&file);
    finder.found
}

/// Constants that are strings.
struct Constants(BTreeMap<String, String>);

impl<'a> Visit<'a> for Constants {
    fn visit_item_const(&mut self, item: &'a ItemConst) {
        if let Some(text) = string(&item.expr) {
            self.0.insert(item.ident.to_string(), text);
        }
    }
}

fn string(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Lit(literal) => match &literal.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

/// The last name of a path.
fn last_name(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
        _ => None,
    }
}

/// Finds the checks of a file.
#[derive(Default)]
struct Finder<'a> {
    constants: BTreeMap<String, String>,
    /// What was assigned to the local names of the function.
    locals: BTreeMap<String, Vec<&'a Expr>>,
    /// What determines that the code here runs, from the outside in.
    conditions: Vec<&'a Expr>,
    found: Vec<Check>,
}

impl<'a> Finder<'a> {
    fn function(&mut self, visit: impl FnOnce(&mut Self)) {
        let conditions = std::mem::take(&mut self.conditions);
        let locals = std::mem::take(&mut self.locals);
        visit(self);
        (self.conditions, self.locals) = (conditions, locals);
    }

    /// Visits code that runs because of `condition`.
    fn under(&mut self, condition: &'a Expr, visit: impl FnOnce(&mut Self)) {
        self.conditions.push(condition);
        visit(self);
        self.conditions.pop();
    }

    /// Whether a test relates two values.
    fn relates(&self, test: &Expr, seen: &mut BTreeSet<String>) -> bool {
        match test {
            Expr::Paren(inner) => self.relates(&inner.expr, seen),
            Expr::Reference(inner) => self.relates(&inner.expr, seen),
            Expr::Unary(inner) if matches!(inner.op, UnOp::Not(_)) => {
                self.relates(&inner.expr, seen)
            }
            Expr::Binary(both) if matches!(both.op, BinOp::And(_) | BinOp::Or(_)) => {
                self.relates(&both.left, seen) || self.relates(&both.right, seen)
            }
            Expr::Let(inner) => self.relates(&inner.expr, seen),
            Expr::Path(path) => {
                let name = path.path.get_ident().map(ToString::to_string).unwrap_or_default();
                let assigned = self.locals.get(&name).filter(|_| seen.insert(name.clone()));
                assigned.is_some_and(|all| all.iter().any(|expr| self.relates(expr, seen)))
            }
            other => {
                let mut comparison = Comparison(false);
                comparison.visit_expr(other);
                comparison.0
            }
        }
    }
}

fn named_by(pattern: &Pat, names: &mut Vec<String>) {
    match pattern {
        Pat::Ident(one) => names.push(one.ident.to_string()),
        Pat::Type(typed) => named_by(&typed.pat, names),
        Pat::Tuple(several) => several.elems.iter().for_each(|one| named_by(one, names)),
        Pat::TupleStruct(several) => several.elems.iter().for_each(|one| named_by(one, names)),
        _ => {}
    }
}

impl<'a> Visit<'a> for Finder<'a> {
    fn visit_item_mod(&mut self, item: &'a ItemMod) {
        if !super::rooms::is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'a ItemImpl) {
        if !super::rooms::is_test(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'a ItemFn) {
        if !super::rooms::is_test(&item.attrs) {
            self.function(|this| visit::visit_item_fn(this, item));
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'a ImplItemFn) {
        if !super::rooms::is_test(&item.attrs) {
            self.function(|this| visit::visit_impl_item_fn(this, item));
        }
    }

    fn visit_local(&mut self, local: &'a Local) {
        let Some(init) = &local.init else { return };
        self.visit_expr(&init.expr);
        if let Some((_, otherwise)) = &init.diverge {
            self.under(&init.expr, |this| this.visit_expr(otherwise));
        }
        let mut names = Vec::new();
        named_by(&local.pat, &mut names);
        for name in names {
            self.locals.entry(name).or_default().push(&init.expr);
        }
    }

    fn visit_expr_if(&mut self, expr: &'a ExprIf) {
        self.visit_expr(&expr.cond);
        self.under(&expr.cond, |this| {
            this.visit_block(&expr.then_branch);
            if let Some((_, otherwise)) = &expr.else_branch {
                this.visit_expr(otherwise);
            }
        });
    }

    fn visit_expr_match(&mut self, expr: &'a ExprMatch) {
        self.visit_expr(&expr.expr);
        for arm in &expr.arms {
            let test = match &arm.pat {
                Pat::Guard(pattern) => &pattern.guard,
                _ => &expr.expr,
            };
            self.under(test, |this| this.visit_expr(&arm.body));
        }
    }

    fn visit_expr_method_call(&mut self, expr: &'a ExprMethodCall) {
        self.visit_expr(&expr.receiver);
        self.under(&expr.receiver, |this| {
            expr.args.iter().for_each(|argument| this.visit_expr(argument));
        });
    }

    fn visit_expr_call(&mut self, call: &'a ExprCall) {
        visit::visit_expr_call(self, call);
        let name = last_name(&call.func).unwrap_or_default();
        if !CHECKS.contains(&name.as_str()) {
            return;
        }
        let Some(message) = call.args.last() else { return };
        let constant = || self.constants.get(&last_name(message)?).cloned();
        // A message that is passed on is counted where it comes from.
        let Some(message) = string(message).or_else(constant) else { return };
        let test = match name.as_str() {
            "violated" => self.conditions.last().copied(),
            _ => call.args.first(),
        };
        let relates = test.is_some_and(|test| self.relates(test, &mut BTreeSet::new()));
        self.found.push(Check { message, relates });
    }
}

/// Whether an expression compares two values or looks one up in another.
struct Comparison(bool);

/// Whether a value is the same each time.
fn is_constant(expr: &Expr) -> bool {
    match expr {
        Expr::Lit(_) => true,
        Expr::Unary(inner) => is_constant(&inner.expr),
        Expr::Paren(inner) => is_constant(&inner.expr),
        Expr::Reference(inner) => is_constant(&inner.expr),
        Expr::Cast(inner) => is_constant(&inner.expr),
        Expr::Array(all) => all.elems.iter().all(is_constant),
        Expr::Call(call) => {
            let name = last_name(&call.func).unwrap_or_default();
            // `Some(2)`, `Lsn::default()`.
            call.args.iter().all(is_constant)
                && (name == "default" || name.starts_with(char::is_uppercase))
        }
        // `LIMIT`, `None`, `Kind::Data`.
        Expr::Path(_) => last_name(expr).is_some_and(|name| name.starts_with(char::is_uppercase)),
        _ => false,
    }
}

impl<'a> Visit<'a> for Comparison {
    fn visit_expr_binary(&mut self, expr: &'a syn::ExprBinary) {
        use BinOp::{Eq, Ge, Gt, Le, Lt, Ne};
        let compares = matches!(expr.op, Eq(_) | Ne(_) | Lt(_) | Le(_) | Gt(_) | Ge(_));
        self.0 |= compares && !is_constant(&expr.left) && !is_constant(&expr.right);
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_method_call(&mut self, call: &'a ExprMethodCall) {
        let looks_up = LOOKUPS.contains(&call.method.to_string().as_str());
        self.0 |= looks_up && call.args.iter().any(|argument| !is_constant(argument));
        visit::visit_expr_method_call(self, call);
    }
}

/// The messages among `messages` that one of the strings names: it is the message, or [`WORDS`] words of it at least
/// that are in no other.
fn named<'a>(messages: &BTreeSet<&'a str>, strings: &BTreeSet<String>) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    for text in strings {
        if let Some(message) = messages.get(text.as_str()) {
            found.insert(*message);
        } else if text.split_whitespace().count() >= WORDS {
            let mut in_these = messages.iter().filter(|message| message.contains(text.as_str()));
            if let (Some(message), None) = (in_these.next(), in_these.next()) {
                found.insert(message);
            }
        }
    }
    found
}

#[test]
fn there_are_enough_of_them() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut of_all = Source::default();
    for name in TESTS_OF_ALL {
        of_all.add_tests(&crates.join(name));
    }
    let (mut all, mut all_relating) = (0, 0);
    let mut wanting = Vec::new();
    for Demand { name, density, relating, named: least_named } in DEMANDS {
        let mut source = Source::read(&crates.join(name));
        source.strings.extend(of_all.strings.iter().cloned());
        let count = source.checks.len();
        let related = source.checks.iter().filter(|check| check.relates).count();
        let messages = source.checks.iter().map(|check| check.message.as_str()).collect();
        let reached = named(&messages, &source.strings);
        println!(
            "{name}: {count} checks in {} lines of code; {related} relate two states; tests name {} of {} messages",
            source.lines,
            reached.len(),
            messages.len(),
        );
        for message in messages.difference(&reached) {
            println!("    no test names: {message}");
        }
        (all, all_relating) = (all + count, all_relating + related);
        for (share, of, least, what) in [
            (count * 10, source.lines, density, "checks in 1,000 lines"),
            (related, count, relating, "per cent that relate two states"),
            (reached.len(), messages.len(), least_named, "per cent that a test names"),
        ] {
            if share * 100 < least * of {
                wanting.push(format!("{name}: {share} of {of}: fewer than {least} {what}"));
            }
        }
    }
    assert!(wanting.is_empty(), "{wanting:#?}");
    assert!(all_relating * 2 >= all, "only {all_relating} of {all} checks relate two states");
}

/// The checks of a function with this body: their messages, and whether they relate two states.
fn checks_in(body: &str) -> Vec<(String, bool)> {
    let found = checks(&format!("const MOST: &str = \"text\"; fn f() {{ {body} }}"));
    found.into_iter().map(|check| (check.message, check.relates)).collect()
}

#[test]
fn what_is_tested_relates_two_states_or_not() {
    for (body, relates) in [
        ("if a.length > b.length { violated(\"m\") }", true),
        ("if a.length > 3 || b { violated(\"m\") }", false),
        ("if self.order != Order::First { violated(\"m\") }", false),
        ("let holds = a == b; crate::invariant(holds, name, \"m\")?;", true),
        ("let (x, holds) = (1, a > LIMIT); invariant(!holds, name, \"m\")?;", false),
        ("let Some(x) = all.get(index) else { violated(\"m\") };", true),
        ("let Some(x) = all.first() else { violated(\"m\") };", false),
        ("match x { None if a < b => violated(\"m\"), _ => {} }", true),
        ("always(all.iter().find(|x| x.id == id), name, \"m\")?;", true),
        ("always(all.pop(), name, \"m\")?;", false),
        ("let n = x.checked_sub(y).unwrap_or_else(|| violated(\"m\"));", true),
    ] {
        assert_eq!(checks_in(body), [("m".to_owned(), relates)], "{body}");
    }
}

#[test]
fn calls_are_told_from_definitions_and_tests() {
    assert_eq!(checks_in("violated(MOST)"), [("text".to_owned(), false)]);
    assert!(checks("pub fn violated(what: &str) -> ! { panic!() }").is_empty());
    assert!(checks_in("self.check_invariant(\"m\"); must_violate(x, \"m\")").is_empty());
    let tests = "#[cfg(all(test, not(loom)))] mod tests { fn f() { violated(\"in a test\") } }";
    assert!(checks(tests).is_empty());
    let mut found = BTreeSet::new();
    strings(of_tests(tests.parse().unwrap()), &mut found);
    assert_eq!(found, BTreeSet::from(["in a test".to_owned()]));
}

#[test]
fn a_message_is_named_by_words_of_its_own() {
    let messages = BTreeSet::from(["pieces do not overlap", "zones do not overlap", "a zone ends"]);
    let named = |text: &str| {
        let strings = BTreeSet::from([text.to_owned()]);
        self::named(&messages, &strings).into_iter().collect::<Vec<_>>()
    };
    assert_eq!(named("zones do not"), ["zones do not overlap"]);
    assert!(named("do not overlap").is_empty() && named("a zone").is_empty());
    assert_eq!(named("a zone ends"), ["a zone ends"]);
}
