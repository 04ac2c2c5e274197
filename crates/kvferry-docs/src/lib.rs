//! Reads the error types of all crates from their sources, and makes the page that says what to do
//! about each.
//!
//! An error type is a public `enum` or `struct` that derives thiserror's `Error`. What it says to its
//! user is in `#[error("…")]`; the last paragraph of its documentation (of each variant's, for an
//! enum) starts with `What to do: `.

//!
//! The page about the log is made in [`log`].

#![forbid(unsafe_code)]

pub mod log;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{fs, io};

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Expr, Item, Lit, LitStr, Meta, Token, Visibility};

/// How the line that helps begins, in the documentation of an error.
pub const REMEDY: &str = "What to do: ";

/// A public error type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorType {
    /// The crate that it belongs to.
    pub package: String,
    /// Its name.
    pub name: String,
    /// What its documentation says.
    pub meaning: String,
    /// An enum's variants, or the one error that a struct is.
    pub cases: Vec<Case>,
}

/// One way to go wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// The variant; for a struct, its own name.
    pub name: String,
    /// What the user reads, with `{names}` for values. `None`: the message of the error inside.
    pub message: Option<String>,
    /// What its documentation says.
    pub meaning: String,
    /// What to do about it; `None` where nobody has written it yet.
    pub remedy: Option<String>,
}

/// The public error types of all crates in a folder that somebody gets, by crate, in the order of their sources.
pub fn read(crates: &Path) -> io::Result<Vec<ErrorType>> {
    let mut types = vec![];
    for package in entries(crates)? {
        // Tools of this repository; what becomes the Python package is not on crates.io either.
        let manifest = fs::read_to_string(package.join("Cargo.toml"))?;
        if manifest.contains("publish = false") && !manifest.contains("cdylib") {
            continue;
        }
        let mut sources = vec![];
        collect(&package.join("src"), "rs", &mut sources)?;
        let package = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
        for source in sources {
            let file = syn::parse_file(&fs::read_to_string(&source)?).map_err(|problem| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {problem}", source.display()),
                )
            })?;
            find(&package, &file.items, &mut types);
        }
    }
    Ok(types)
}

/// `type::variant` of every error that does not say what to do.
pub fn helpless(types: &[ErrorType]) -> Vec<String> {
    let cases = types.iter().flat_map(|kind| kind.cases.iter().map(move |case| (kind, case)));
    cases
        .filter(|(_, case)| case.remedy.is_none())
        .map(|(kind, case)| format!("{} {}::{}", kind.package, kind.name, case.name))
        .collect()
}

/// The page.
pub fn page(types: &[ErrorType]) -> String {
    let mut page = String::from(HEAD);
    for kind in types {
        let (name, package) = (&kind.name, &kind.package);
        _ = write!(page, "\n## {name} in {package}\n{}\n\n", kind.meaning);
        page.push_str("| | message | meaning, and what to do |\n|---|---|---|\n");
        for case in &kind.cases {
            let message = case.message.as_ref().map_or_else(
                || "the message of the error inside".to_owned(),
                |message| format!("`{message}`"),
            );
            let mut meaning = case.meaning.clone();
            if let Some(remedy) = &case.remedy {
                _ = write!(meaning, " **{}** {remedy}", REMEDY.trim_end());
            }
            let row =
                [format!("`{}`", case.name), message, meaning].map(|cell| cell.replace('|', "\\|"));
            _ = writeln!(page, "| {} | {} | {} |", row[0], row[1], row[2]);
        }
    }
    page
}

const HEAD: &str = "\
# Errors, and what to do
<!-- Written by `cargo run -p kvferry-docs` from the documentation of the error types: change it there. -->

Every error that a caller can meet, by crate. A word in braces stands for a value, `…` for a text made on the spot.
The vLLM connector writes the same messages to the log. In Python, a variant's name in lower case
(`RegionsOverlap`: `regions_overlap`) is the `kind` of the exception.
";

fn find(package: &str, items: &[Item], types: &mut Vec<ErrorType>) {
    for item in items {
        match item {
            Item::Enum(item) if is_error(&item.vis, &item.attrs) => {
                let cases = item.variants.iter();
                types.push(ErrorType {
                    package: package.to_owned(),
                    name: item.ident.to_string(),
                    meaning: documentation(&item.attrs).0,
                    cases: cases.map(|one| case(&one.ident, &one.attrs)).collect(),
                });
            }
            Item::Struct(item) if is_error(&item.vis, &item.attrs) => types.push(ErrorType {
                package: package.to_owned(),
                name: item.ident.to_string(),
                meaning: documentation(&item.attrs).0,
                cases: vec![case(&item.ident, &item.attrs)],
            }),
            Item::Mod(item) => {
                if let Some((_, items)) = &item.content {
                    find(package, items, types);
                }
            }
            _ => {}
        }
    }
}

/// The lint `unreachable_pub` sees to it that what is `pub` can be reached.
fn is_error(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    let derives = |attribute: &Attribute| {
        let Meta::List(list) = &attribute.meta else { return false };
        list.path.is_ident("derive") && names_error(list.tokens.clone())
    };
    matches!(visibility, Visibility::Public(_)) && attributes.iter().any(derives)
}

/// `Error` or `thiserror::Error` among what is derived.
fn names_error(derived: TokenStream) -> bool {
    derived.into_iter().any(|token| matches!(token, TokenTree::Ident(name) if name == "Error"))
}

fn case(name: &syn::Ident, attributes: &[Attribute]) -> Case {
    let (meaning, remedy) = documentation(attributes);
    Case { name: name.to_string(), message: message(attributes), meaning, remedy }
}

/// The text in `#[error("…", …)]`.
fn message(attributes: &[Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("error"))?;
    let parse = |input: syn::parse::ParseStream<'_>| {
        let text: LitStr = input.parse()?;
        if input.parse::<Option<Token![,]>>()?.is_some() {
            input.parse::<TokenStream>()?;
        }
        Ok(text.value())
    };
    Some(placeholders(&attribute.parse_args_with(parse).ok()?))
}

/// `{base:#x}` becomes `{base}`; `{}` and `{0}`, which have no name, become `…`.
fn placeholders(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('{') {
        plain.push_str(before);
        let (inside, after) = after.split_once('}').unwrap_or((after, ""));
        let name = inside.split(':').next().unwrap_or_default();
        if name.is_empty() || name.starts_with(|first: char| first.is_ascii_digit()) {
            plain.push('…');
        } else {
            _ = write!(plain, "{{{name}}}");
        }
        rest = after;
    }
    plain + rest
}

/// What documentation says, on one line, and what it says to do.
fn documentation(attributes: &[Attribute]) -> (String, Option<String>) {
    let lines = attributes.iter().filter_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        let Expr::Lit(value) = &pair.value else { return None };
        let Lit::Str(text) = &value.lit else { return None };
        pair.path.is_ident("doc").then(|| text.value().trim().to_owned())
    });
    let lines: Vec<String> = lines.collect();
    let paragraphs: Vec<String> = lines
        .split(String::is_empty)
        .filter(|lines| !lines.is_empty())
        .map(|lines| lines.join(" "))
        .collect();
    let (remedy, meaning) = match paragraphs.split_last() {
        Some((last, before)) => match last.strip_prefix(REMEDY) {
            Some(remedy) => (Some(plain_links(remedy)), before),
            None => (None, &paragraphs[..]),
        },
        None => (None, &[][..]),
    };
    (plain_links(&meaning.join(" ")), remedy)
}

/// Links of Rust's documentation lead nowhere on the page: `` [`Plan`] `` and `[text](target)` become
/// what they show.
fn plain_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        let Some((shown, after)) = after.split_once(']') else { break };
        plain.push_str(before);
        plain.push_str(shown);
        rest = match after.strip_prefix('(').and_then(|target| target.split_once(')')) {
            Some((_, after)) => after,
            None => after,
        };
    }
    plain + rest
}

fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<io::Result<_>>()?;
    entries.sort();
    Ok(entries)
}

/// The sources in a folder, by how their names end.
fn collect(folder: &Path, ending: &str, sources: &mut Vec<PathBuf>) -> io::Result<()> {
    for path in entries(folder)? {
        if path.is_dir() {
            collect(&path, ending, sources)?;
        } else if path.extension().is_some_and(|extension| extension == ending) {
            sources.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_read() {
        let source = r#"
            /// Why it failed.
            #[derive(Debug, thiserror::Error)]
            pub enum Oops {
                /// Too long, says [`Plan`].
                ///
                /// What to do: make it shorter than [the limit](LIMIT),
                /// or leave it out.
                #[error("{found:#x} is longer than {}; {0}", LIMIT)]
                Long { found: u64 },
                /// Another one.
                #[error(transparent)]
                Inside(#[from] Other),
            }
            #[derive(thiserror::Error)]
            pub(crate) enum Hidden { #[error("no")] No }
            #[derive(Debug)]
            pub enum Plain { A }
            /// A single one.
            ///
            /// What to do: nothing.
            #[derive(Error)]
            #[error("single")]
            pub struct Single(pub String);
        "#;
        let mut types = vec![];
        find("crate", &syn::parse_file(source).unwrap().items, &mut types);
        let names: Vec<&str> = types.iter().map(|kind| kind.name.as_str()).collect();
        assert_eq!(names, ["Oops", "Single"]);
        assert_eq!(
            types[0].cases[0],
            Case {
                name: "Long".to_owned(),
                message: Some("{found} is longer than …; …".to_owned()),
                meaning: "Too long, says `Plan`.".to_owned(),
                remedy: Some("make it shorter than the limit, or leave it out.".to_owned()),
            }
        );
        assert_eq!(types[0].cases[1].message, None);
        assert_eq!(helpless(&types), ["crate Oops::Inside"]);
        let page = page(&types);
        assert!(
            page.contains("| `Single` | `single` | A single one. **What to do:** nothing. |"),
            "{page}"
        );
    }
}
