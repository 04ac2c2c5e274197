//! The worked example of docs/new-model.md, read from the page itself: from a `config.json` to copies,
//! checked byte by byte.

use kvferry_layout::{Law, Manifest, Piece};
use kvferry_models::{Facts, FactsError, Sort, Topology, families, rules::vllm};
use kvferry_plan::{Plan, Request, Table};

const PAGE: &str = include_str!("../../../docs/new-model.md");

/// The blocks of the page in a language.
fn blocks(language: &str) -> Vec<String> {
    let mut found: Vec<String> = vec![];
    let mut inside = false;
    for line in PAGE.lines() {
        match line.strip_prefix("```") {
            Some(word) if !inside && word == language => {
                inside = true;
                found.push(String::new());
            }
            Some(_) => inside = false,
            None if inside => {
                let block = found.last_mut().expect("a block is open");
                block.push_str(line);
                block.push('\n');
            }
            None => {}
        }
    }
    found
}

/// The value of an option in the page's command.
fn option(name: &str) -> String {
    let command = blocks("sh").concat();
    let mut words = command.split_whitespace();
    words.find(|word| *word == name).unwrap_or_else(|| panic!("the command has no {name}"));
    words.next().expect("an option has a value").to_owned()
}

struct Rank {
    manifest: Manifest,
    memory: Vec<u8>,
}

impl Rank {
    fn all(model: &kvferry_models::Model, topology: &str, engine: &str, poison: u8) -> Vec<Self> {
        let topology: Topology = topology.parse().unwrap();
        let ranks = vllm::manifests(model, &topology, engine).unwrap();
        let rank = |manifest: Manifest| {
            let bytes = usize::try_from(manifest.regions()[0].bytes).unwrap();
            Self { manifest, memory: vec![poison; bytes] }
        };
        ranks.into_iter().map(rank).collect()
    }

    fn at(&self, address: u64) -> usize {
        usize::try_from(address - self.manifest.regions()[0].base).unwrap()
    }

    /// Every byte that a request of `tokens` tokens has here: where, and its value.
    fn bytes(&self, tables: &[Vec<u32>], tokens: u64) -> Vec<(usize, u8)> {
        let mut bytes = vec![];
        for (group, table) in self.manifest.groups().iter().zip(tables) {
            for piece in &group.pieces {
                let kind = &self.manifest.kinds()[piece.kind as usize];
                let entries = if kind.law == Law::SNAPSHOT { 1 } else { tokens };
                for entry in 0..entries {
                    let size = group.tokens_per_block.unwrap_or(1);
                    let block = table[usize::try_from(entry / size).unwrap()];
                    each_element(piece, |coordinates, inner| {
                        let view = &piece.view;
                        let start = view.offset
                            + u64::from(block) * view.block
                            + entry % size * view.entry
                            + inner;
                        for byte in 0..u64::from(kind.format.bytes) {
                            let value = value(&piece.state, entry, coordinates, byte);
                            bytes.push((usize::try_from(start + byte).unwrap(), value));
                        }
                    });
                }
            }
        }
        bytes
    }
}

/// Calls `each` with the coordinates of every element of a piece, and its bytes from the entry's start.
fn each_element(piece: &Piece, mut each: impl FnMut(&[u64], u64)) {
    assert!(piece.view.kernel.is_none(), "the example has whole blocks");
    let spans = &piece.bounds.0;
    let mut coordinates: Vec<u64> = spans.iter().map(|span| span.start).collect();
    loop {
        let steps = coordinates.iter().zip(spans).zip(&piece.view.axes);
        let offset = steps.map(|((at, span), stride)| (at - span.start) * stride).sum();
        each(&coordinates, offset);
        let Some(axis) =
            (0..spans.len()).rev().find(|&axis| coordinates[axis] + 1 < spans[axis].end)
        else {
            return;
        };
        coordinates[axis] += 1;
        for later in axis + 1..spans.len() {
            coordinates[later] = spans[later].start;
        }
    }
}

/// A byte that depends on nothing but what it is.
fn value(state: &str, entry: u64, coordinates: &[u64], byte: u64) -> u8 {
    let mut sum: u64 = 0xcbf2_9ce4_8422_2325;
    let words = coordinates.iter().copied().chain([entry, byte]);
    for word in state.bytes().map(u64::from).chain(words) {
        sum = (sum ^ word).wrapping_mul(0x0100_0000_01b3);
        sum ^= sum >> 29;
    }
    u8::try_from(sum >> 56).unwrap()
}

/// Block tables that use no block twice: `step` has no divisor in common with the blocks there are.
fn tables(rank: &Manifest, tokens: u64, step: u32) -> Vec<Vec<u32>> {
    let blocks = rank.groups()[0].blocks;
    let mut id = 0;
    let mut next = || {
        id = (id + step) % (blocks - 1);
        1 + id
    };
    let entries = rank.groups().iter().map(|group| match group.tokens_per_block {
        None => 1,
        Some(size) => tokens.div_ceil(size),
    });
    let tables: Vec<Vec<u32>> = entries.map(|count| (0..count).map(|_| next()).collect()).collect();
    let mut ids = tables.concat();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), tables.concat().len(), "{tables:?}");
    tables
}

#[test]
fn the_page_leads_to_the_right_bytes() {
    let [facts, config]: [String; 2] = blocks("json").try_into().expect("facts and a config");
    let facts = Facts::shipped().with(&facts).unwrap();
    let model = families::read_with(&facts, "echo", &config).unwrap();
    assert!(matches!(&model.caches[0].sort, Sort::Recurrent(kind) if kind.word() == "echo"));
    let tokens: u64 = option("--tokens").parse().unwrap();
    let mut sources = Rank::all(&model, &option("--prefill"), "prefill", 0xaa);
    let targets = Rank::all(&model, &option("--decode"), "decode", 0x55);
    assert_eq!((sources.len(), targets.len()), (4, 2));
    let from = tables(&sources[0].manifest, tokens, 4);
    let to = tables(&targets[0].manifest, tokens, 7);
    for rank in &mut sources {
        for (at, byte) in rank.bytes(&from, tokens) {
            rank.memory[at] = byte;
        }
    }
    let manifests: Vec<&Manifest> = sources.iter().map(|rank| &rank.manifest).collect();
    let source: Vec<Table<'_>> = from.iter().map(|table| Table::new(table)).collect();
    let destination: Vec<Table<'_>> = to.iter().map(|table| Table::new(table)).collect();
    let cached = vec![0; to.len()];
    for mut rank in targets {
        let mut expected = rank.memory.clone();
        let bytes = rank.bytes(&to, tokens);
        assert!(bytes.len() > 10_000);
        for (at, byte) in bytes {
            expected[at] = byte;
        }
        let plan = Plan::compile(&rank.manifest, &manifests).unwrap();
        let request =
            Request { tokens, cached: &cached, source: &source, destination: &destination };
        let transfer = plan.transfer(&request).unwrap();
        for (number, other) in sources.iter().enumerate() {
            for copy in transfer.copies(number) {
                let (start, end) = (other.at(copy.source), rank.at(copy.destination));
                let length = usize::try_from(copy.bytes).unwrap();
                rank.memory[end..end + length]
                    .copy_from_slice(&other.memory[start..start + length]);
            }
        }
        let wrong = rank.memory.iter().zip(&expected).filter(|(one, other)| one != other).count();
        assert_eq!(wrong, 0, "{} of {} bytes are wrong", wrong, expected.len());
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_its_place() {
    let [facts, config]: [String; 2] = blocks("json").try_into().expect("facts and a config");
    let read = |from: &str, to: &str| -> FactsError {
        assert!(facts.contains(from), "{from}");
        Facts::shipped().with(&facts.replace(from, to)).unwrap_err()
    };
    for (from, to, part) in [
        ("{", "[", "cannot be read"),
        ("\"law\"", "\"lore\"", "unknown field `lore`"),
        ("\"sequence\"", "\"token\"", "kind 'echo': a recurrent kind has the law 'sequence'"),
        ("heads * dim", "heads * width", "'heads * width' uses 'width'"),
        ("heads * dim", "heads *", "it ends where a name or a number should be"),
        ("[\"channel\", \"heads\"]", "[\"column\", \"heads\"]", "split along 'column'"),
        ("\"ring\"", "\"conv.u\"", "'conv.u' twice"),
        ("\"format\": \"state\"", "\"format\": \"int3\"", "the format 'int3'"),
        ("\"kind\": \"echo\"", "\"kind\": \"ecko\"", "did you mean 'echo'?"),
        ("\"slots\": \"echo_slots\",", "", "where the size 'slots' comes from"),
        ("[\"attention\"] } }]", "[\"attend\"] } }]", "there is no module 'attend'"),
        (
            "\"echo\": {\n      \"about\"",
            "\"mamba2\": {\n      \"about\"",
            "kind 'mamba2': it is defined already",
        ),
        ("\"echo_lm\"", "\"jamba\"", "family 'jamba': it is defined already"),
    ] {
        let error = read(from, to).to_string();
        assert!(error.contains(part), "{from} → {to}: {error}");
    }
    let known = Facts::shipped().with(&facts).unwrap();
    let read = |from: &str, to: &str| {
        assert!(config.contains(from), "{from}");
        families::read_with(&known, "echo", &config.replace(from, to)).unwrap_err().to_string()
    };
    for (from, to, part) in [
        ("\"echo_slots\": 5", "\"echo_slots\": 0", "'echo_slots'"),
        ("\"echo_slots\": 5,", "", "no field 'echo_slots'"),
        ("\"echo_heads\": 8", "\"echo_heads\": 7", "a multiple of 'echo_heads', which is 7"),
        ("\"echo_conv_width\": 4", "\"echo_conv_width\": 1", "echo_conv_width - 1"),
        ("[\"echo\", ", "[\"ecko\", ", "echo or full_attention"),
        ("\"echo_lm\"", "\"echo_ml\"", "did you mean 'echo_lm'?"),
    ] {
        let error = read(from, to);
        assert!(error.contains(part), "{from} → {to}: {error}");
    }
    // Without the facts it is a family like any other that nobody knows.
    let error = families::read("echo", &config).unwrap_err().to_string();
    assert!(error.contains("'echo_lm' is not known"), "{error}");
}
