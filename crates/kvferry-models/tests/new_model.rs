//! The worked example of docs/new-model.md, read from the page itself: from a `config.json` to copies,
//! checked byte by byte.

use std::collections::BTreeMap;

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
            for copy in transfer.loops(number).unwrap().copies() {
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

/// What an adapter does: from the shapes of one rank's tensors back to the sizes of the model.
#[test]
fn sizes_follow_from_the_shapes_of_a_rank() {
    let facts = Facts::shipped().with(&blocks("json")[0]).unwrap();
    let solve = |shapes: [&[u64]; 2], told: &[(&str, u64)], ranks: u64| {
        let told = told.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect();
        let shapes = shapes.map(<[u64]>::to_vec);
        facts.states().solve("echo", &shapes, &told, ranks).map_err(|error| error.to_string())
    };
    let sizes = |told: &[(&str, u64)]| -> BTreeMap<String, u64> {
        told.iter().map(|(name, size)| ((*name).to_owned(), *size)).collect()
    };
    // The page's model: a rank of four has a quarter of the heads, and one of two groups.
    let quarter: [&[u64]; 2] = [&[2 * 16 + 12, 3], &[2, 5, 16]];
    let seen = [("heads", 8), ("dim", 16), ("slots", 5), ("columns", 3)];
    let all = sizes(&[&seen[..], &[("groups", 2), ("gate", 12)]].concat());
    assert_eq!(solve(quarter, &[("groups", 2)], 4).unwrap(), all);
    // The product of groups and gates says neither, and one group on each rank may be any number of
    // them: both are left open.
    assert_eq!(solve(quarter, &[], 4).unwrap(), sizes(&seen));
    let open = sizes(&[&seen[..], &[("gate", 12)]].concat());
    assert_eq!(solve(quarter, &[("gate", 12)], 4).unwrap(), open);
    // A single rank has them all, and several on a rank are no replicas.
    let whole: [&[u64]; 2] = [&[8 * 16 + 2 * 12, 3], &[8, 5, 16]];
    assert_eq!(solve(whole, &[("gate", 12)], 1).unwrap(), all);
    let half: [&[u64]; 2] = [&[4 * 16 + 3 * 12, 3], &[4, 5, 16]];
    assert_eq!(solve(half, &[("gate", 12)], 2).unwrap()["groups"], 6);
    // States that the solved sizes make have the shapes of the rank.
    let given: Vec<(&str, u64)> = all.iter().map(|(name, size)| (name.as_str(), *size)).collect();
    let bf16 = facts.states().format("bf16").unwrap();
    let formats = [("model", &bf16), ("state", &bf16)];
    let tensors = facts.states().tensors("echo", &given, &formats).unwrap();
    for (tensor, shape) in tensors.iter().zip(quarter) {
        let first: u64 = tensor.states.iter().map(|state| state.held(3, 4).0[0].len()).sum();
        assert_eq!(first, shape[0]);
    }
    for (shapes, told, ranks, part) in [
        (quarter, ("groups", 3), 4, "[44, 3] of conv.u + conv.g on one of 4 ranks does not fit"),
        (quarter, ("groups", 20), 4, "does not fit the sizes columns = 3, dim = 16, groups = 20"),
        (quarter, ("gate", 5), 4, "'echo' do not fit: the shape [44, 3]"),
        (quarter, ("heads", 16), 4, "the shape [2, 5, 16] of ring on one of 4 ranks"),
        (quarter, ("dim", 8), 4, "does not fit"),
        (quarter, ("groups", 0), 4, "'groups' is 0"),
        (quarter, ("group", 2), 4, "it has no size 'group'"),
        (quarter, ("gate", u64::MAX), 4, "larger than any size"),
        (quarter, ("groups", 2), 0, "0 ranks"),
        ([&[44, 3], &[2, 5]], ("groups", 2), 4, "should have 3 axes"),
        ([&[20, 3], &[2, 5, 16]], ("groups", 2), 4, "[20, 3]"),
        ([&[44, 3], &[2, 0, 16]], ("groups", 2), 4, "is empty"),
    ] as [([&[u64]; 2], _, _, _); 12]
    {
        let error = solve(shapes, &[told], ranks).unwrap_err();
        assert!(error.contains(part), "{shapes:?} {told:?} {ranks}: {error}");
    }
    let shapes = [vec![44, 3]];
    let error = facts.states().solve("echo", &shapes, &BTreeMap::new(), 4).unwrap_err();
    assert!(error.to_string().contains("1 shapes, but it has 2 tensors"), "{error}");
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
