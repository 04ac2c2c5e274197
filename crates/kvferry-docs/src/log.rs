//! Reads every call that logs from the sources, and makes the page that says what each line means.
//!
//! What a line means and what to do about it is in one table, `log.txt` beside this crate's sources. An entry is a
//! paragraph: the first line has, in brackets, what it is about, and then the message with `…` for
//! whatever is filled in. The rest says what it means; the last sentence starts with `What to do: `.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::{fs, io};

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::LitStr;

use crate::{REMEDY, collect, entries};

/// From the most important; what Rust calls them, what Python calls them, and the heading on the page.
const LEVELS: [(&str, &str, &str); 4] = [
    ("error", "error", "Errors"),
    ("warn", "warning", "Warnings"),
    ("info", "info", "Information"),
    ("debug", "debug", "Details, with `logging` set to `debug`"),
];

/// What a line about a single request must say: which.
const OF_A_REQUEST: &str = "a request";
const NAMES_A_REQUEST: [&str; 3] = ["request", "key", "theirs"];

/// A call that logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The file, from the root of the tree.
    pub file: String,
    /// The index of its level, the most important first.
    pub level: usize,
    /// What it says, with `…` for what is filled in.
    pub message: String,
    /// What it says beside that, by name.
    pub fields: Vec<String>,
}

/// What the table says of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Whom it is about.
    pub about: String,
    /// What it means.
    pub meaning: String,
    /// What to do about it.
    pub remedy: String,
}

/// The table, by message.
pub type Table = BTreeMap<String, Entry>;

/// Every call that logs, in the order of the sources.
pub fn sites(root: &Path) -> io::Result<Vec<Site>> {
    let mut sites = vec![];
    for package in entries(&root.join("crates"))? {
        let mut sources = vec![];
        collect(&package.join("src"), "rs", &mut sources)?;
        for source in sources {
            let tokens: TokenStream = fs::read_to_string(&source)?
                .parse()
                .map_err(|problem| wrong(format!("{}: {problem}", source.display())))?;
            let mut found = vec![];
            rust(tokens, &mut found);
            sites.extend(found.into_iter().map(|site| site.in_file(root, &source)));
        }
    }
    let mut sources = vec![];
    collect(&root.join("python/kvferry"), "py", &mut sources)?;
    for source in sources {
        let found = python(&fs::read_to_string(&source)?)
            .map_err(|problem| wrong(format!("{}: {problem}", source.display())))?;
        sites.extend(found.into_iter().map(|site| site.in_file(root, &source)));
    }
    Ok(sites)
}

/// The table as it is written.
pub fn table(text: &str) -> io::Result<Table> {
    let mut table = Table::new();
    for paragraph in text.split("\n\n").map(str::trim).filter(|one| !one.is_empty()) {
        let (head, rest) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
        let (about, message) =
            head.strip_prefix('[').and_then(|head| head.split_once("] ")).ok_or_else(|| {
                wrong(format!("'{head}' does not begin with whom it is about, in brackets"))
            })?;
        let rest = rest.split_whitespace().collect::<Vec<_>>().join(" ");
        let (meaning, remedy) = rest
            .split_once(REMEDY)
            .ok_or_else(|| wrong(format!("the entry of '{message}' has no '{REMEDY}'")))?;
        let entry = Entry {
            about: about.to_owned(),
            meaning: meaning.trim().to_owned(),
            remedy: remedy.to_owned(),
        };
        if table.insert(message.to_owned(), entry).is_some() {
            return Err(wrong(format!("there are two entries of '{message}'")));
        }
    }
    Ok(table)
}

/// What is wrong with the table, or with a line: sentences.
pub fn problems(sites: &[Site], table: &Table) -> Vec<String> {
    let said: BTreeSet<&str> = sites.iter().map(|site| site.message.as_str()).collect();
    let mut problems = vec![];
    for site in sites {
        let Some(entry) = table.get(&site.message) else {
            problems.push(format!("{}: no entry for '{}'", site.file, site.message));
            continue;
        };
        // A worker says everything about a load inside a span that names it. Python says it in the message.
        let named = site.file.contains("/worker/")
            || (site.file.ends_with(".py") && site.message.contains('…'))
            || site.fields.iter().any(|field| NAMES_A_REQUEST.contains(&field.as_str()));
        if entry.about == OF_A_REQUEST && !named {
            problems.push(format!("{}: '{}' does not say which request", site.file, site.message));
        }
    }
    let orphans = table.keys().filter(|message| !said.contains(message.as_str()));
    problems.extend(orphans.map(|message| format!("nothing logs '{message}'")));
    problems
}

/// The page.
pub fn page(sites: &[Site], table: &Table) -> String {
    let mut page = String::from(HEAD);
    for (level, (.., heading)) in LEVELS.iter().enumerate() {
        _ = write!(
            page,
            "\n## {heading}\n\n| message | with | about | meaning, and what to do |\n|---|---|---|---|\n"
        );
        let here = sites.iter().filter(|site| site.level == level);
        let messages: BTreeSet<&str> = here.clone().map(|site| site.message.as_str()).collect();
        for message in messages {
            let fields: BTreeSet<&str> = here
                .clone()
                .filter(|site| site.message == message)
                .flat_map(|site| site.fields.iter().map(String::as_str))
                .collect();
            let fields: Vec<String> = fields.into_iter().map(|name| format!("`{name}`")).collect();
            let Some(Entry { about, meaning, remedy }) = table.get(message) else { continue };
            let meaning = format!("{meaning} **{}** {remedy}", REMEDY.trim_end());
            let row = [code(message), fields.join(" "), about.clone(), meaning];
            let row = row.map(|cell| cell.replace('|', "\\|"));
            _ = writeln!(page, "| {} |", row.join(" | "));
        }
    }
    page
}

/// As code, in more backticks than the message has in a row. The spaces are dropped again; they keep a backtick
/// at an end apart.
fn code(message: &str) -> String {
    let longest = message.split(|c| c != '`').map(str::len).max().unwrap_or(0);
    match longest {
        0 => format!("`{message}`"),
        _ => {
            let fence = "`".repeat(longest + 1);
            format!("{fence} {message} {fence}")
        }
    }
}

const HEAD: &str = "\
# What the log says
<!-- Written by `cargo run -p kvferry-docs` from the sources and crates/kvferry-docs/log.txt: change it there. -->

Every line that kvferry can log, by level. Each begins with `kvferry: `; `…` stands for what is filled in, and the names
under *with* follow as `name=value`. What a failure inside a line means is on the page about
[errors](errors.md).

**Following one request.** Every line about a request names it: `request` (or a name in the message) is its name on
the engine that logs, `theirs` its name on the engine that it is read from, `from` that engine, and `key` its name on
this engine and the number of its lease. A name is the one that the router gave to the request, with eight digits that
vLLM adds: `grep` for it without those finds the lines of both engines. Lines of D's workers also end in `request`,
`from` and `theirs`. With [traces](tracing.md) on, `is traced as` leads from a request to its trace.

The one line that is not in the tables is `… lines were dropped here`: more came at once than Python fetched.
";

impl Site {
    fn in_file(self, root: &Path, file: &Path) -> Self {
        let file = file.strip_prefix(root).unwrap_or(file);
        Self { file: file.display().to_string(), ..self }
    }
}

fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The calls of tracing's macros, but for those in tests.
fn rust(tokens: TokenStream, sites: &mut Vec<Site>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while let Some(token) = tokens.get(at) {
        let after = &tokens[at + 1..];
        match (token, after) {
            (TokenTree::Punct(hash), [TokenTree::Group(attribute), ..])
                if hash.as_char() == '#'
                    && attribute.to_string().replace(' ', "") == "[cfg(test)]" =>
            {
                // Up to the end of what it is an attribute of.
                let ends = |token: &TokenTree| match token {
                    TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                    TokenTree::Punct(mark) => mark.as_char() == ';',
                    _ => false,
                };
                at += after.iter().position(ends).unwrap_or(after.len()) + 1;
            }
            (TokenTree::Ident(name), [TokenTree::Punct(mark), TokenTree::Group(group), ..])
                if mark.as_char() == '!' && LEVELS.iter().any(|(rust, ..)| name == rust) =>
            {
                let level = LEVELS.iter().position(|(rust, ..)| name == rust).unwrap_or(0);
                sites.extend(call(level, group.stream()));
                rust(group.stream(), sites);
                at += 2;
            }
            (TokenTree::Group(group), _) => rust(group.stream(), sites),
            _ => {}
        }
        at += 1;
    }
}

/// The arguments of a macro: fields, then the message, then what is filled in.
fn call(level: usize, arguments: TokenStream) -> Option<Site> {
    let tokens: Vec<TokenTree> = arguments.into_iter().collect();
    let comma =
        |token: &TokenTree| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ',');
    let mut fields = vec![];
    for argument in tokens.split(comma) {
        if let [TokenTree::Literal(text)] = argument {
            let text: LitStr = syn::parse_str(&text.to_string()).ok()?;
            let message =
                filled(&text.value(), '{', |rest| rest.find('}').map_or(rest.len(), |end| end + 1));
            return Some(Site { file: String::new(), level, message, fields });
        }
        let name = argument.iter().find_map(|token| match token {
            TokenTree::Ident(name) => Some(name.to_string()),
            _ => None,
        });
        fields.extend(name);
    }
    None
}

/// The calls of a logger's methods in a Python source.
fn python(source: &str) -> Result<Vec<Site>, String> {
    let mut sites = vec![];
    for (level, (_, name, _)) in LEVELS.iter().enumerate() {
        let method = format!("logger.{name}(");
        for (at, _) in source.match_indices(&method) {
            let line = source[..at].matches('\n').count() + 1;
            let mut rest = source[at + method.len()..].trim_start();
            let mut message = String::new();
            while let Some(text) = rest.strip_prefix('"') {
                let end =
                    text.find('"').ok_or_else(|| format!("line {line}: the text does not end"))?;
                message.push_str(&text[..end]);
                rest = text[end + 1..].trim_start();
            }
            if message.is_empty() || message.contains('\\') {
                return Err(format!(
                    "line {line}: what is logged must begin with a plain text in double quotes"
                ));
            }
            let message = message.strip_prefix("kvferry: ").ok_or_else(|| {
                format!("line {line}: what is logged must begin with 'kvferry: '")
            })?;
            let ends = |rest: &str| {
                rest.find(|c: char| c.is_ascii_alphabetic()).map_or(rest.len(), |end| end + 1)
            };
            let message = filled(message, '%', ends);
            sites.push(Site { file: String::new(), level, message, fields: vec![] });
        }
    }
    Ok(sites)
}

/// A message with `…` for what is filled in: from a mark to where that ends.
fn filled(text: &str, mark: char, length: impl Fn(&str) -> usize) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once(mark) {
        plain.push_str(before);
        plain.push('…');
        rest = &after[length(after)..];
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_found_in_rust() {
        let source = r##"
            fn say() {
                if late { warn!(%from, after = ?one.after, "the lease \
                    of {request} expired") }
                match x { _ => tracing::debug!("{a:?} is {}", f(1, "two")), }
                let text = "warn!(\"not a call\")";
            }
            #[cfg(test)]
            mod tests { fn quiet() { info!("of a test") } }
            fn again() { info!(count = all.len(), "done") }
        "##;
        let mut sites = vec![];
        rust(source.parse().unwrap(), &mut sites);
        let said: Vec<_> =
            sites.iter().map(|one| (one.level, &*one.message, one.fields.join(" "))).collect();
        assert_eq!(
            said,
            [
                (1, "the lease of … expired", "from after".to_owned()),
                (3, "… is …", String::new()),
                (2, "done", "count".to_owned()),
            ]
        );
    }

    #[test]
    fn calls_are_found_in_python() {
        let source = "logger.warning(\n    \"kvferry: %s took %.2f s, \"\n    \"and failed\",\n    name,\n)\nlogger.info(\"kvferry: up\")\nlogger.setLevel(3)\n";
        let said: Vec<_> =
            python(source).unwrap().into_iter().map(|one| (one.level, one.message)).collect();
        assert_eq!(said, [(1, "… took … s, and failed".to_owned()), (2, "up".to_owned())]);
        assert!(python("logger.info(f\"kvferry: {x}\")").is_err());
        assert!(python("logger.info(\"up\")").is_err());
    }

    #[test]
    fn what_is_wrong_is_said() {
        let text = "[a request] gone\nIt is gone. What to do: wait.\n\n[a peer] never said\nX. What to do: y.\n";
        let table = table(text).unwrap();
        assert_eq!(table["gone"].meaning, "It is gone.");
        let site = |message: &str, fields: &[&str]| Site {
            file: "crates/a/src/b.rs".to_owned(),
            level: 1,
            message: message.to_owned(),
            fields: fields.iter().map(|&name| name.to_owned()).collect(),
        };
        let good = [site("gone", &["request"]), site("never said", &[])];
        assert_eq!(problems(&good, &table), Vec::<String>::new());
        assert!(
            page(&good, &table)
                .contains("| `gone` | `request` | a request | It is gone. **What to do:** wait. |")
        );
        assert_eq!(
            problems(&[site("gone", &["who"]), site("new", &[])], &table),
            [
                "crates/a/src/b.rs: 'gone' does not say which request",
                "crates/a/src/b.rs: no entry for 'new'",
                "nothing logs 'never said'",
            ]
        );
        for bad in [
            "no brackets\nX. What to do: y.",
            "[a peer] helpless\nX.",
            "[a] b\nWhat to do: x.\n\n[a] b\nWhat to do: x.",
        ] {
            assert!(super::table(bad).is_err(), "{bad}");
        }
    }
}
