//! The bodies of the fuzz targets for the data protocol: the parser of its frames, and what a server makes of the
//! greeting of a stranger.
//!
//! Whatever the bytes, nothing may panic, nothing large may be allocated for a small frame, and what
//! decodes must encode to the same bytes. The same bodies run in normal tests.

use kvferry_layout::{BlockPair, Loop, Loops};

use crate::contract::Instance;
use crate::tcp::frame::{
    self, Answer, Challenge, Hello, Listing, MAX_REQUEST_BYTES, MAX_SPANS, Request, Verb, put_span,
};
use crate::tcp::greeting::{Greeting, Next, Refusal};
use crate::tcp::seal::{Cipher, Terms};
use crate::tcp::{Secret, gather};

/// Decodes the bytes as each kind of frame. Returns how many kinds they were.
///
/// # Panics
///
/// When the parser breaks one of its rules.
pub fn decode_frame(bytes: &[u8]) -> usize {
    let mut kinds = 0;
    if let Some((front, _)) = bytes.split_first_chunk()
        && let Ok(hello) = Hello::decode(front)
    {
        assert_eq!(hello.encode(), *front);
        kinds += 1;
    }
    if let Some((front, _)) = bytes.split_first_chunk()
        && let Ok(challenge) = Challenge::decode(front)
    {
        assert_eq!(challenge.encode(), *front);
        kinds += 1;
    }
    if let Some((front, rest)) = bytes.split_first_chunk()
        && let Ok(request) = Request::decode(front)
    {
        assert_eq!(request.encode(), *front);
        assert!(request.body_bytes() <= gather::MAX_BYTES.max(MAX_SPANS * frame::SPAN_BYTES));
        assert!(request.bytes <= MAX_REQUEST_BYTES || request.verb == Verb::Release);
        kinds += 1;
        // As the server does: so many bytes are received, whatever they are.
        if request.verb == Verb::Read
            && let Some(body) = rest.get(..request.body_bytes())
        {
            kinds += usize::from(decode_spans(&request, body));
        }
        if request.verb == Verb::Gather
            && let Some(body) = rest.get(..request.body_bytes())
        {
            kinds += usize::from(decode_gather(body));
        }
    }
    if let Some((front, rest)) = bytes.split_first_chunk()
        && let Ok(answer) = Answer::decode(front)
    {
        assert_eq!(answer.encode(), *front);
        kinds += 1;
        // As the client does: nothing is allocated before the length is checked.
        let length = usize::try_from(answer.bytes).unwrap_or(usize::MAX);
        if Listing::check_length(answer.bytes).is_ok()
            && let Some(body) = rest.get(..length)
        {
            let listing = Listing::decode(body).expect("its length was checked");
            assert_eq!(listing.encode(), body);
            kinds += 1;
        }
    }
    if let Ok(listing) = Listing::decode(bytes) {
        assert_eq!(listing.encode(), bytes);
        assert!(listing.regions.capacity() <= bytes.len());
    }
    kinds
}

/// Lets a server hear the bytes as a connection's greeting, in pieces of several sizes. Returns how many answers it gave.
///
/// # Panics
///
/// When it takes them for a proof, reads more than a greeting has, or when it matters how they were cut.
pub fn greet(bytes: &[u8]) -> usize {
    let heard = [1, 7, usize::MAX].map(|piece| hear(bytes, piece));
    assert!(heard.iter().all(|one| *one == heard[0]), "{heard:?}");
    heard[0].1
}

/// How many bytes were heard, how many answers they had, and how it ended.
fn hear(mut bytes: &[u8], piece: usize) -> (usize, usize, Option<String>) {
    let secret = Secret { instance: Instance([1; 16]), token: [2; 32] };
    let (mut greeting, mut heard, mut answers) = (Greeting::new(false), 0, 0);
    while !bytes.is_empty() {
        let room = greeting.room();
        let some = room.len().min(piece).min(bytes.len());
        room[..some].copy_from_slice(&bytes[..some]);
        bytes = &bytes[some..];
        heard += some;
        match greeting.came(some, &secret) {
            Ok(Next::More) => {}
            Ok(Next::Answer(_)) => answers += 1,
            Ok(Next::Proven(_)) => panic!("no bytes that were there before the nonce are a proof"),
            Err(refusal) => {
                assert!(heard <= Hello::BYTES + 32);
                // An answer to another version proves nothing.
                if let Refusal::Version(_, answer) = &refusal {
                    assert_eq!(*answer, Challenge::EMPTY.encode());
                }
                return (heard, answers, Some(refusal.to_string()));
            }
        }
    }
    (heard, answers, None)
}

fn decode_spans(request: &Request, body: &[u8]) -> bool {
    let mut spans = Vec::new();
    if frame::spans(request, body, &mut spans).is_err() {
        return false;
    }
    let mut again = Vec::new();
    let mut sum = 0;
    for (address, bytes) in spans {
        assert!(bytes > 0 && address.checked_add(bytes).is_some(), "{bytes} bytes at {address:#x}");
        sum += u128::from(bytes);
        put_span(&mut again, address, bytes);
    }
    assert_eq!(again, body);
    assert_eq!(sum, u128::from(request.bytes));
    true
}

/// What may be gathered fits a slot, and both halves of it are sound.
fn decode_gather(body: &[u8]) -> bool {
    let Ok(loops) = gather::decode(body, gather::SLOT_BYTES) else { return false };
    let mut again = vec![];
    gather::encode(&loops, &mut again);
    assert_eq!(again, body);
    let bytes = loops.packed_bytes().expect("it was checked");
    assert!(bytes <= gather::SLOT_BYTES && loops.pairs().len() <= gather::LIMITS.pairs);
    let gathered = loops.gather(0x1000).expect("the buffer lies in the address space");
    for nest in gathered.nests() {
        let (_, written) = nest.extents().expect("its length was checked");
        assert!(written.start >= 0x1000 && written.end <= 0x1000 + bytes, "{written:?}");
    }
    true
}

const TERMS: Terms = Terms { cipher: Cipher::ChaCha, content: true };

/// Good frames to start mutating from.
pub fn frames() -> Vec<Vec<u8>> {
    let read = Request { verb: Verb::Read, spans: 3, id: 7, bytes: 4196 };
    let mut request = read.encode().to_vec();
    for (address, bytes) in [(0x7f00_0000_1000, 4096), (0x7f00_0000_8000, 99), (1, 1)] {
        put_span(&mut request, address, bytes);
    }
    let regions = vec![
        kvferry_layout::Region::host(0x7f00_0000_0000, 1 << 20),
        kvferry_layout::Region::host(0x7f00_1000_0000, 64),
    ];
    let listing = Listing { generation: 3, regions }.encode();
    let verdict = frame::Verdict::Done;
    let mut answer = Answer { verdict, id: 7, bytes: listing.len() as u64 }.encode().to_vec();
    answer.extend(listing);
    vec![
        Hello { nonce: [5; 32], terms: TERMS }.encode().to_vec(),
        Challenge { nonce: [5; 32], terms: TERMS, proof: [6; 32] }.encode().to_vec(),
        request,
        Request { verb: Verb::Regions, spans: 0, id: 8, bytes: 0 }.encode().to_vec(),
        answer,
        Answer { verdict: frame::Verdict::Outside, id: 9, bytes: 64 }.encode().to_vec(),
        to_gather(),
        Request { verb: Verb::Release, spans: 0, id: 11, bytes: 1 << 40 }.encode().to_vec(),
    ]
}

fn to_gather() -> Vec<u8> {
    let mut loops = Loops::default();
    let pairs = [3, 9, 0].map(|source| BlockPair { source, destination: 0 });
    let (table, other) = (loops.add_table(pairs), loops.add_table(pairs[1..].iter().copied()));
    let heads = Loop { count: 4, source: 512, destination: 0 };
    let tokens = Loop { count: 16, source: 4096, destination: 0 };
    for (start, table) in [(0x7f00_0000_1000, table), (0x7f10_0000_0000, other)] {
        let added = loops.add_nest((start, 0), 64, (1 << 16, 0), &[tokens, heads], table);
        added.expect("these loops are sound");
    }
    let mut body = vec![];
    gather::encode(&loops, &mut body);
    let bytes = loops.packed_bytes().unwrap_or_default();
    let spans = body.len() as u32;
    let header = Request { verb: Verb::Gather, spans, id: 10, bytes };
    [&header.encode()[..], &body].concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn good_frames_decode() {
        for frame in frames() {
            assert!(decode_frame(&frame) > 0, "{frame:?}");
        }
    }

    /// How to spoil a frame.
    #[derive(Clone, Debug)]
    enum Spoil {
        Set(prop::sample::Index, u8),
        Field(prop::sample::Index, u64),
        Cut(prop::sample::Index),
        Insert(prop::sample::Index, Vec<u8>),
    }

    fn spoils() -> impl Strategy<Value = Spoil> {
        let index = any::<prop::sample::Index>;
        let numbers = prop_oneof![
            Just(0),
            Just(1),
            Just(1 << 20),
            Just(1 << 32),
            Just(u64::MAX),
            Just(u64::MAX - 4095),
            any::<u64>()
        ];
        prop_oneof![
            (index(), any::<u8>()).prop_map(|(at, value)| Spoil::Set(at, value)),
            (index(), numbers).prop_map(|(at, value)| Spoil::Field(at, value)),
            index().prop_map(Spoil::Cut),
            (index(), prop::collection::vec(any::<u8>(), 1..40))
                .prop_map(|(at, bytes)| Spoil::Insert(at, bytes)),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            decode_frame(&bytes);
            greet(&bytes);
        }

        /// A hello of which at most a byte is wrong is answered, or refused for that byte, and then nothing proves.
        #[test]
        fn spoiled_greetings_open_nothing(
            nonce in any::<[u8; 32]>(),
            spoilt in prop::option::of((0..Hello::BYTES, any::<u8>())),
            rest in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let mut bytes = Hello { nonce, terms: TERMS }.encode().to_vec();
            let good = bytes.clone();
            if let Some((at, byte)) = spoilt {
                bytes[at] = byte;
            }
            let opens = bytes[..12] == good[..12] && bytes[Hello::BYTES - 1] <= 3;
            bytes.extend(rest);
            prop_assert_eq!(greet(&bytes), usize::from(opens));
        }

        #[test]
        fn spoiled_frames_are_decoded_or_refused(
            which in 0usize..8,
            spoils in prop::collection::vec(spoils(), 1..4),
        ) {
            let mut bytes = frames().swap_remove(which);
            for spoil in spoils {
                let end = bytes.len().max(1);
                match spoil {
                    Spoil::Set(at, value) => {
                        if let Some(byte) = bytes.get_mut(at.index(end)) {
                            *byte = value;
                        }
                    }
                    Spoil::Field(at, value) => {
                        let at = at.index(end) / 8 * 8;
                        if let Some(field) = bytes.get_mut(at..at + 8) {
                            field.copy_from_slice(&value.to_le_bytes());
                        }
                    }
                    Spoil::Cut(at) => bytes.truncate(at.index(end)),
                    Spoil::Insert(at, more) => {
                        let at = at.index(bytes.len() + 1);
                        bytes.splice(at..at, more);
                    }
                }
            }
            decode_frame(&bytes);
        }
    }
}
