//! Pairs that must not fit: refused before any byte could move, with the reason and both values.

use std::collections::BTreeSet;

use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, Place, Region, StateBox, View,
    Window, Writer,
};
use kvferry_plan::{Incompatible, Plan};
use kvferry_testkit::draw::{Side, engine};
use kvferry_testkit::drive::compile;
use kvferry_testkit::engine::Engine;
use kvferry_testkit::judge::compatible;
use kvferry_testkit::model::{Layer, Model, Sight};
use kvferry_testkit::mutate::Difference;
use kvferry_testkit::plain::Memory::Separate;
use kvferry_testkit::plain::orders::token_major;
use kvferry_testkit::random::Dice;
use kvferry_testkit::recipe::Recipe;

/// One thing differs between two random engines: every rank that it concerns is refused, and every
/// other rank is not.
#[test]
fn one_difference_is_refused_where_it_concerns_a_rank() {
    let mut refused: Vec<(Difference, u64)> = vec![];
    for difference in Difference::ALL {
        let mut count = 0;
        for seed in 0..60 {
            let mut dice = Dice::new(seed);
            let model = Model::draw(&mut dice);
            let Some(other) = difference.apply(&model, &mut dice) else { continue };
            let destination = engine(&model, Side::Destination, &mut dice);
            let source = engine(&other, Side::Source, &mut dice);
            let sources: Vec<usize> = (0..source.ranks.len()).collect();
            for rank in 0..destination.ranks.len() {
                let verdict = compile(&source, &sources, &destination, rank);
                let fits = compatible(&source, &sources, &destination, rank);
                match (&verdict, &fits) {
                    (Ok(_), Ok(())) | (Err(_), Err(_)) => {}
                    _ => panic!("{difference:?}, seed {seed}, rank {rank}: {verdict:?}, {fits:?}"),
                }
                count += u64::from(verdict.is_err());
                // A plan that does not prove would be a fault of the compiler, not of the pair.
                if let Err(refusal) = verdict {
                    assert!(!matches!(refusal, Incompatible::Unproven { .. }), "{refusal}");
                }
            }
        }
        refused.push((difference, count));
    }
    assert!(refused.iter().all(|(_, count)| *count >= 30), "{refused:?}");
}

/// The same for a source whose manifests are not all there, down to none.
#[test]
fn missing_manifests_are_refused_where_they_are_needed() {
    let (mut refused, mut served) = (0, 0);
    for seed in 0..300 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, &mut dice);
        let mut sources: Vec<usize> = (0..source.ranks.len()).collect();
        dice.shuffle(&mut sources);
        sources.truncate(dice.index(sources.len() + 1));
        for rank in 0..destination.ranks.len() {
            let verdict = compile(&source, &sources, &destination, rank);
            match (verdict, compatible(&source, &sources, &destination, rank)) {
                (Ok(_), Ok(())) => served += 1,
                (Err(_), Err(_)) => refused += 1,
                (verdict, fits) => panic!("seed {seed}, rank {rank}: {verdict:?}, {fits:?}"),
            }
        }
    }
    assert!(refused > 200 && served > 100, "{refused} refused, {served} served");
}

fn model(layers: Vec<Layer>) -> Model {
    Model::new(layers)
}

fn simple(model: &Model, lanes: u64) -> Engine {
    Recipe::plain("e", model, lanes).lay_out(Separate, &token_major())
}

fn refusal(source: &Engine, destination: &Engine) -> Incompatible {
    let sources: Vec<usize> = (0..source.ranks.len()).collect();
    let refusal = compile(source, &sources, destination, 0).unwrap_err();
    let message = refusal.to_string();
    assert!(message.ends_with('.') && message.matches('.').count() >= 2, "what to do: {message}");
    refusal
}

fn plain(dim: u64) -> Model {
    model(vec![
        Layer::attention("layers.0", Sight::Full, 4, dim, dim),
        Layer::latent("layers.1", 5),
    ])
}

#[test]
fn identity() {
    let mut other = plain(2);
    other.identity.insert("revision".to_owned(), "2".to_owned());
    let expected = Incompatible::Identity {
        fact: "revision".to_owned(),
        source_rank: source_rank(&simple(&other, 1)),
        source_value: Some("2".to_owned()),
        destination_value: Some("1".to_owned()),
    };
    assert_eq!(refusal(&simple(&other, 1), &simple(&plain(2), 1)), expected);

    // A fact that only one side states differs too, in both directions.
    other = plain(2);
    other.identity.insert("quantisation".to_owned(), "fp8".to_owned());
    let (with, without) = (simple(&other, 1), simple(&plain(2), 1));
    for (source, destination) in [(&with, &without), (&without, &with)] {
        let found = refusal(source, destination);
        let Incompatible::Identity { fact, source_value, destination_value, .. } = &found else {
            panic!("{found}")
        };
        assert_eq!(fact, "quantisation");
        assert_ne!(source_value, destination_value);
        assert!(found.to_string().contains("'fp8'"), "{found}");
    }
}

/// Not every engine can state them; two that do must say the same.
#[test]
fn some_facts_are_compared_where_both_state_them() {
    ["num_kv_shared_layers", "weights", "engine"].into_iter().for_each(compared_where_stated);
}

fn compared_where_stated(fact: &str) {
    let stated = |said: &str| {
        let mut model = plain(2);
        model.identity.insert(fact.to_owned(), said.to_owned());
        simple(&model, 1)
    };
    for (source, destination) in
        [(stated("2"), simple(&plain(2), 1)), (simple(&plain(2), 1), stated("2"))]
    {
        compile(&source, &[0], &destination, 0).unwrap();
    }
    let found = refusal(&stated("2"), &stated("4")).to_string();
    assert!(found.contains(&format!("'{fact}' differs: '2' on the source")), "{found}");
    assert!(found.contains("'4' on the destination"), "{found}");
}

/// How refusals name the only source rank.
fn source_rank(engine: &Engine) -> String {
    let found = refusal(engine, &simple(&plain(3), 1));
    match found {
        Incompatible::Identity { source_rank, .. } | Incompatible::Axes { source_rank, .. } => {
            assert!(source_rank.contains('e'), "{source_rank}");
            source_rank
        }
        other => panic!("{other}"),
    }
}

#[test]
fn axes() {
    let found = refusal(&simple(&plain(2), 2), &simple(&plain(3), 2));
    let Incompatible::Axes { state, source_axes, destination_axes, .. } = &found else {
        panic!("{found}")
    };
    assert_eq!(
        (state.as_str(), source_axes[1].length, destination_axes[1].length),
        ("layers.0/k", 2, 3)
    );
    let message = found.to_string();
    assert!(message.contains("dim=2") && message.contains("dim=3"), "{message}");
}

/// What a name means is known together with what writes it.
#[test]
fn writers() {
    let engine = |said: Option<(&str, Option<&str>)>| {
        let mut engine = simple(&plain(2), 1);
        for rank in &mut engine.ranks {
            let mut draft = rank.manifest.clone().into_draft();
            for kind in 0..draft.kinds.len() as u32 {
                if let Some((code, bytes)) = said {
                    let name = format!("store of {code}");
                    let bytes = bytes.map(str::to_owned);
                    draft.writers.insert(kind, Writer { name, bytes, code: code.to_owned() });
                }
            }
            rank.manifest = Manifest::new(draft).unwrap();
        }
        engine
    };
    let [a, b] = ["vLLM 0.32", "vLLM 0.33"];
    for (one, other, fits) in [
        (None, None, true),
        // What they write decides, whatever their code, and their code where that is not known.
        (Some((a, Some("1"))), Some((b, Some("1"))), true),
        (Some((a, Some("1"))), Some((a, Some("2"))), false),
        (Some((a, None)), Some((a, None)), true),
        (Some((a, None)), Some((b, None)), false),
        (Some((a, Some("1"))), Some((a, None)), true),
        (Some((a, Some("1"))), Some((b, None)), false),
        // A side that says nothing was taken by its name until now.
        (None, Some((a, Some("1"))), true),
        (None, Some((a, None)), false),
    ] {
        for (source, destination) in [(one, other), (other, one)] {
            let verdict = compile(&engine(source), &[0], &engine(destination), 0);
            assert_eq!(verdict.is_ok(), fits, "{source:?} {destination:?}");
            let Err(found) = verdict else { continue };
            let Incompatible::Writer { state, source_writer, .. } = &found else {
                panic!("{found}")
            };
            assert_eq!(state, "layers.0/k");
            assert_eq!(source_writer.as_ref().map(|it| it.code.as_str()), source.map(|it| it.0));
            for (code, _) in [source, destination].into_iter().flatten() {
                assert!(found.to_string().contains(&format!("store of {code}")), "{found}");
            }
        }
    }
}

#[test]
fn law() {
    let mut other = plain(2);
    other.layers[1].tensors[0].law = Law::every(4);
    let found = refusal(&simple(&other, 1), &simple(&plain(2), 1));
    let Incompatible::Law { state, source_law, destination_law, .. } = &found else {
        panic!("{found}")
    };
    assert_eq!(state, "layers.1/latent");
    assert_eq!((*source_law, *destination_law), (Law::every(4), Law::PER_TOKEN));
}

#[test]
fn window() {
    let with = |sight| model(vec![Layer::attention("layers.0", sight, 2, 2, 2)]);
    let found =
        refusal(&simple(&with(Sight::Sliding(9)), 1), &simple(&with(Sight::Sliding(10)), 1));
    let Incompatible::Window { state, kept, needed, .. } = &found else { panic!("{found}") };
    assert_eq!(state, "layers.0/k");
    assert_eq!((*kept, *needed), (Window::sliding(9), Window::sliding(10)));
    let message = found.to_string();
    assert!(message.contains("last 9 tokens") && message.contains("last 10 tokens"), "{message}");
    // Full attention needs what no window keeps.
    refusal(&simple(&with(Sight::Chunked(64)), 1), &simple(&with(Sight::Full), 1));
}

#[test]
fn missing_states() {
    let mut other = plain(2);
    other.layers.pop();
    let found = refusal(&simple(&other, 3), &simple(&plain(2), 1));
    let Incompatible::Missing { state, sources, instead, .. } = &found else { panic!("{found}") };
    assert_eq!((state.as_str(), *sources, &instead[..]), ("layers.1/latent", 3, &[][..]));
    assert!(found.to_string().contains("Load the same layers"), "{found}");
}

/// Keys and values are two states, or one of records: then it is not the layer that is missing.
#[test]
fn states_that_are_kept_otherwise() {
    let mut other = plain(2);
    for state in other.layers[0].tensors.iter_mut().flat_map(|tensor| &mut tensor.states) {
        state.name = format!("{}.scaled", state.name);
        state.format.name = "int4".to_owned();
    }
    let found = refusal(&simple(&other, 2), &simple(&plain(2), 1));
    let Incompatible::Missing { state, format, instead, .. } = &found else { panic!("{found}") };
    let names: Vec<&str> = instead.iter().map(|(state, _)| state.as_str()).collect();
    assert_eq!(
        (state.as_str(), &names[..]),
        ("layers.0/k", &["layers.0/k.scaled", "layers.0/v.scaled"][..])
    );
    let message = found.to_string();
    for part in [
        &format!("keeps it as {format}"),
        "'layers.0/k.scaled' as int4",
        "the same cache data type",
    ] {
        assert!(message.contains(part), "{message}");
    }
    assert!(!message.contains("latent"), "what both have is not the difference: {message}");
}

#[test]
fn missing_heads() {
    let (source, destination) = (simple(&plain(2), 4), simple(&plain(2), 2));
    let found = compile(&source, &[0, 2, 3], &destination, 0).unwrap_err();
    let Incompatible::Uncovered { state, part, phase } = &found else { panic!("{found}") };
    assert_eq!((state.as_str(), *phase), ("layers.0/k", Phase::ALL));
    assert_eq!((part.0[0].start, part.0[0].end), (1, 2), "head 1 is on rank 1 alone");
    // The other destination rank does not need it.
    compile(&source, &[0, 2, 3], &destination, 1).unwrap();
}

#[test]
fn missing_turns() {
    let latents = model(vec![Layer::latent("layers.0", 3)]);
    let source = Recipe::plain("p", &latents, 4).context(2).lay_out(Separate, &token_major());
    let destination = simple(&latents, 1);
    compile(&source, &[3, 1, 0, 2], &destination, 0).unwrap();
    let found = compile(&source, &[3, 0, 2], &destination, 0).unwrap_err();
    let Incompatible::Uncovered { state, phase, .. } = &found else { panic!("{found}") };
    assert_eq!(state, "layers.0/latent");
    assert!((0..64).any(|entry| phase.holds(entry)), "{phase}");
    assert!(
        (0..64).all(|entry| !phase.holds(entry) || entry / 2 % 4 == 1),
        "turn 1 is missing: {phase}"
    );
}

/// A destination rank that holds nothing fits every source, also none.
#[test]
fn nothing_to_fill_fits_nothing_to_read() {
    let latents = model(vec![Layer::latent("layers.0", 3)]);
    let empty =
        Recipe::plain("d", &latents, 1).stages(&[&[0], &[]]).lay_out(Separate, &token_major());
    let manifests: [&Manifest; 0] = [];
    Plan::compile(&empty.ranks[1].manifest, &manifests).unwrap();
    let found = Plan::compile(&empty.ranks[0].manifest, &manifests).unwrap_err();
    let Incompatible::Missing { state, sources, .. } = &found else { panic!("{found}") };
    assert_eq!((state.as_str(), *sources), ("layers.0/latent", 0));
}

/// Every refusal has a message of its own that names the state it is about.
#[test]
fn messages_differ() {
    let mut format = plain(2);
    format.layers[0].tensors[0].states[0].format.name = "f16".to_owned();
    let mut law = plain(2);
    law.layers[1].tensors[0].law = Law::every(4);
    let mut missing = plain(2);
    missing.layers.pop();
    let destination = simple(&plain(2), 1);
    let messages: BTreeSet<String> = [format, law, missing, plain(7)]
        .iter()
        .map(|other| refusal(&simple(other, 1), &destination).to_string())
        .collect();
    assert_eq!(messages.len(), 4);
    assert!(messages.iter().all(|message| message.contains("layers.")), "{messages:?}");
}

/// A manifest can be sound and still cost too much to hold against another: that is a refusal, not a
/// hanging handshake.
#[test]
fn pairs_that_would_take_for_ever_are_refused() {
    let manifest = |pieces: u64, phase: Phase, tokens: u64| {
        let bytes = tokens;
        let region = |n: u64| Region { base: (n + 1) << 24, bytes, place: Place::Host };
        let piece = |n: u64| Piece {
            state: "layers.0/k".to_owned(),
            kind: 0,
            bounds: StateBox(vec![(n, n + 1).into()]),
            phase,
            need: None,
            view: View {
                region: n as u32,
                offset: 0,
                block: bytes,
                kernel: None,
                entry: 1,
                axes: vec![1],
            },
        };
        let group = Group {
            name: "attention".to_owned(),
            blocks: 1,
            null_block: None,
            tokens_per_block: Some(tokens),
            window: Window::FULL,
            pieces: (0..pieces).map(piece).collect(),
            scratch: vec![],
        };
        let kind = Kind {
            format: Format::new("u8", 1),
            axes: vec![Axis::new("head", pieces)],
            law: Law::PER_TOKEN,
        };
        Manifest::new(Draft {
            regions: (0..pieces).map(region).collect(),
            kinds: vec![kind],
            groups: vec![group],
            ..Draft::default()
        })
        .unwrap()
    };
    let held = |modulus, end| Phase { modulus, held: (0..end).into() };
    // Turns of two lengths that hardly ever come together.
    let (source, destination) =
        (manifest(16, held(2, 1), 2), manifest(16, held(2047, 2047 - 1), 2047));
    let refusal = Plan::compile(&destination, &[&source]).unwrap_err();
    assert!(matches!(refusal, Incompatible::TooComplex { .. }), "{refusal}");
    // One state in very many pieces on both sides.
    let many = manifest(8_000, Phase::ALL, 1);
    let refusal = Plan::compile(&many, &[&many]).unwrap_err();
    assert!(matches!(refusal, Incompatible::TooComplex { .. }), "{refusal}");
    // A few hundred are no trouble.
    let some = manifest(300, Phase::ALL, 1);
    assert!(Plan::compile(&some, &[&some]).is_ok());
}
