//! What a server does with peers that do not play by the rules.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::frame::{Answer, Hello, Request, Verb, Welcome, put_piece};
use super::proof::{CHALLENGE_BYTES, End, prove};
use super::{Tcp, TcpOptions, parse};
use crate::error::Error;
use crate::transport::{Operation, Status, Transport};
use kvferry_layout::ByteCopy;
use kvferry_layout::Region;

const PAGE: usize = 4096;
/// Fills what is registered.
const OPEN: u8 = 0x11;
/// Fills what is not.
const SECRET: u8 = 0xc7;

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// A server whose memory is registered in the middle only.
struct Victim {
    transport: Tcp,
    memory: Vec<u8>,
}

impl Victim {
    fn new() -> Self {
        let mut memory = vec![SECRET; 3 * PAGE];
        memory[PAGE..2 * PAGE].fill(OPEN);
        let transport = Tcp::new(TcpOptions::default()).unwrap();
        let victim = Self { transport, memory };
        let region = Region::host(victim.base() + PAGE as u64, PAGE as u64);
        // SAFETY: the transport is dropped before the memory, in the order of the fields; while
        // peers may write it, it is only read byte by byte below.
        unsafe { victim.transport.register(region) }.unwrap();
        victim
    }

    fn base(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    fn byte(&self, at: usize) -> u8 {
        assert!(at < self.memory.len());
        // SAFETY: inside the memory; volatile, because a peer may be writing it.
        unsafe { self.memory.as_ptr().add(at).read_volatile() }
    }

    /// Whether what is not registered is as it was.
    fn is_unharmed(&self) -> bool {
        (0..PAGE).chain(2 * PAGE..3 * PAGE).all(|at| self.byte(at) == SECRET)
    }

    fn connect(&self, change: impl FnOnce(&mut [u8; Hello::BYTES])) -> TcpStream {
        self.connect_with(change, |_| ())
    }

    /// Connects with a hello and a token that are not quite right. Goes on as far as the server does.
    fn connect_with(
        &self,
        change: impl FnOnce(&mut [u8; Hello::BYTES]),
        spoil: impl FnOnce(&mut [u8; 32]),
    ) -> TcpStream {
        let address = parse(&self.transport.describe().unwrap()).unwrap();
        let mut token = address.token;
        spoil(&mut token);
        let mut hello = Hello {
            nonce: crate::random::random().unwrap(),
            instance: [1; 16],
            session: crate::random::random().unwrap(),
            lane: 0,
            proof_bytes: 0,
        }
        .encode();
        change(&mut hello);
        let mut stream = TcpStream::connect(address.addresses[0]).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(&hello).unwrap();
        let mut challenge = [0; CHALLENGE_BYTES];
        if stream.read_exact(&mut challenge).is_ok() {
            let nonce = challenge[..32].try_into().unwrap();
            let _ = stream.write_all(&prove(&token, End::Client, &hello, nonce));
        }
        stream
    }

    /// A connection that was let in.
    fn enter(&self) -> TcpStream {
        let mut stream = self.connect(|_| ());
        let mut welcome = [0; Welcome::BYTES];
        stream.read_exact(&mut welcome).unwrap();
        assert!(Welcome::decode(&welcome).unwrap().admitted);
        stream
    }
}

fn request(verb: Verb, id: u64, pieces: &[(u64, u64)], payload: &[u8]) -> Vec<u8> {
    let bytes = match verb {
        Verb::Read | Verb::Write => pieces.iter().map(|piece| piece.1).sum(),
        Verb::Notify => payload.len() as u64,
        Verb::Table => 0,
    };
    let header = Request { verb, pieces: pieces.len() as u32, id, bytes };
    let mut out = header.encode().to_vec();
    for &(address, bytes) in pieces {
        put_piece(&mut out, address, bytes);
    }
    out.extend(payload);
    out
}

/// Everything the server says until it hangs up.
fn rest(mut stream: TcpStream) -> Vec<u8> {
    let _ = stream.shutdown(Shutdown::Write);
    let mut said = Vec::new();
    // A reset instead of an end is as good.
    let _ = stream.read_to_end(&mut said);
    said
}

#[test]
fn without_the_token_nothing_is_served() {
    let victim = Victim::new();
    // Any byte of it.
    for at in 0..32 {
        let mut stream = victim.connect_with(|_| (), |token| token[at] ^= 1);
        let read = request(Verb::Read, 1, &[(victim.base() + PAGE as u64, 64)], &[]);
        let _ = stream.write_all(&read);
        let said = rest(stream);
        assert!(said.len() <= Welcome::BYTES, "{said:?}");
        if let Ok(bytes) = said.try_into() {
            assert!(!Welcome::decode(&bytes).unwrap().admitted);
        }
    }
}

/// What one client said opens no second connection, and the token is not among it.
#[test]
fn a_replay_is_not_served() {
    let victim = Victim::new();
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let hello =
        Hello { nonce: [3; 32], instance: [1; 16], session: [2; 16], lane: 0, proof_bytes: 0 };
    let hello = hello.encode();
    let mut first = TcpStream::connect(address.addresses[0]).unwrap();
    first.write_all(&hello).unwrap();
    let mut challenge = [0; CHALLENGE_BYTES];
    first.read_exact(&mut challenge).unwrap();
    let nonce = challenge[..32].try_into().unwrap();
    let proof = prove(&address.token, End::Client, &hello, nonce);
    first.write_all(&proof).unwrap();
    let mut welcome = [0; Welcome::BYTES];
    first.read_exact(&mut welcome).unwrap();
    assert!(Welcome::decode(&welcome).unwrap().admitted);

    let mut second = TcpStream::connect(address.addresses[0]).unwrap();
    second.write_all(&hello).unwrap();
    second.write_all(&proof).unwrap();
    let mut other = [0; CHALLENGE_BYTES];
    second.read_exact(&mut other).unwrap();
    assert_ne!(challenge[..32], other[..32]);
    let mut welcome = [0; Welcome::BYTES];
    second.read_exact(&mut welcome).unwrap();
    assert!(!Welcome::decode(&welcome).unwrap().admitted);
}

/// A server that does not know the token is not believed, whatever it says.
#[test]
fn a_server_must_prove_itself_too() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let impostor = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; Hello::BYTES];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&[0; CHALLENGE_BYTES]).unwrap();
        let welcome = Welcome { admitted: true, instance: [5; 16], proof_bytes: 0 };
        let _ = stream.write_all(&welcome.encode());
        // What it was told beyond the hello.
        let mut told = Vec::new();
        let _ = stream.read_to_end(&mut told);
        told
    });
    let mut description = super::DESCRIPTION.to_vec();
    description.extend([5; 16]);
    description.extend([7; 32]);
    crate::bytes::put_block(&mut description, address.to_string().as_bytes());
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    let result = transport.connect(&description, soon());
    assert!(matches!(result, Err(Error::PeerLost(_))), "{result:?}");
    assert!(impostor.join().unwrap().is_empty());
}

#[test]
fn a_hello_that_is_none_ends_the_connection() {
    let victim = Victim::new();
    // The magic, the version, the lane, the length of the proof.
    for (at, value) in [(0, 0), (8, 9), (79, 0xff), (83, 0xff)] {
        let stream = victim.connect(|hello| hello[at] = value);
        assert_eq!(rest(stream), [0u8; 0], "byte {at}");
    }
    // One that is cut off.
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let mut stream = TcpStream::connect(address.addresses[0]).unwrap();
    stream.write_all(b"kvferry\x01").unwrap();
    assert_eq!(rest(stream), [0u8; 0]);
    victim.enter();
}

#[test]
fn silent_connections_keep_nobody_out() {
    let victim = Victim::new();
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let silent: Vec<TcpStream> =
        (0..50).map(|_| TcpStream::connect(address.addresses[0]).unwrap()).collect();
    victim.enter();
    drop(silent);
}

#[test]
fn a_description_of_another_run_is_refused() {
    let victim = Victim::new();
    let mut description = victim.transport.describe().unwrap();
    // The instance, then the token.
    for at in [8, 24] {
        description[at] ^= 1;
        let other = Tcp::new(TcpOptions::default()).unwrap();
        let result = other.connect(&description, soon());
        assert!(matches!(result, Err(Error::PeerLost(_))), "{result:?}");
        description[at] ^= 1;
    }
}

#[test]
fn a_lane_that_connects_again_replaces_the_one_before() {
    let victim = Victim::new();
    let session = [9; 16];
    let set = |hello: &mut [u8; Hello::BYTES]| hello[60..76].copy_from_slice(&session);
    let mut first = victim.connect(set);
    let mut welcome = [0; Welcome::BYTES];
    first.read_exact(&mut welcome).unwrap();
    // Half a write, whose other half would land later.
    let target = victim.base() + PAGE as u64;
    let write = request(Verb::Write, 1, &[(target, 64)], &[0xab; 32]);
    first.write_all(&write).unwrap();
    let mut second = victim.connect(set);
    second.read_exact(&mut welcome).unwrap();
    assert!(Welcome::decode(&welcome).unwrap().admitted);
    // The first is dead by now: what is still sent over it goes nowhere.
    let _ = first.write_all(&[0xab; 32]);
    let mut nothing = [0; 1];
    assert!(!matches!(first.read(&mut nothing), Ok(1)));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(victim.byte(PAGE + 40), OPEN);
}

#[test]
fn a_notification_that_comes_again_is_heard_once() {
    let victim = Victim::new();
    let session = [9; 16];
    let set = |hello: &mut [u8; Hello::BYTES]| hello[60..76].copy_from_slice(&session);
    // As a client does that lost its connection before the answer came.
    for (number, text) in [(1, "one"), (1, "one"), (2, "two"), (2, "two"), (1, "one")] {
        let mut stream = victim.connect(set);
        let mut welcome = [0; Welcome::BYTES];
        stream.read_exact(&mut welcome).unwrap();
        stream.write_all(&request(Verb::Notify, number, &[], text.as_bytes())).unwrap();
        let mut answer = [0; Answer::BYTES];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(Answer::decode(&answer).unwrap().id, number);
    }
    let heard = victim.transport.notifications(Instant::now()).unwrap();
    let heard: Vec<_> = heard.iter().map(|n| n.message.as_slice()).collect();
    assert_eq!(heard, [b"one", b"two"]);
}

/// Requests that are right, for a victim at `base`.
fn good_requests(base: u64) -> Vec<Vec<u8>> {
    let open = base + PAGE as u64;
    vec![
        request(Verb::Read, 1, &[(open, 100), (open + 500, 1)], &[]),
        request(Verb::Write, 2, &[(open + 8, 40), (open + 100, 24)], &[0x22; 64]),
        request(Verb::Notify, 3, &[], b"hello"),
        request(Verb::Table, 4, &[], &[]),
        request(Verb::Read, 5, &[(open, PAGE as u64)], &[]),
    ]
}

/// How to spoil a byte of a request.
#[derive(Clone, Debug)]
enum Spoil {
    Set(prop::sample::Index, u8),
    /// A whole field of eight bytes, where lengths and addresses are.
    Field(prop::sample::Index, u64),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
}

fn spoils() -> impl Strategy<Value = Spoil> {
    let index = any::<prop::sample::Index>;
    let extremes = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(u64::MAX - 63),
        Just(1 << 63),
        Just(1 << 32),
        Just(4097),
        any::<u64>()
    ];
    prop_oneof![
        (index(), any::<u8>()).prop_map(|(at, value)| Spoil::Set(at, value)),
        (index(), extremes).prop_map(|(at, value)| Spoil::Field(at, value)),
        index().prop_map(Spoil::Cut),
        (index(), prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(at, bytes)| Spoil::Insert(at, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever a peer sends: nothing outside the registered region is read or written, and a peer
    /// that plays by the rules does not notice.
    #[test]
    fn spoiled_frames_harm_nobody(
        order in prop::collection::vec(0usize..5, 1..6),
        spoils in prop::collection::vec((any::<prop::sample::Index>(), spoils()), 1..4),
    ) {
        thread_local! {
            // One server for all cases: what one of them broke, the next would notice.
            static VICTIM: (Victim, std::cell::RefCell<TcpStream>) = {
                let victim = Victim::new();
                let neighbour = victim.enter().into();
                (victim, neighbour)
            };
        }
        VICTIM.with(|(victim, neighbour)| {
            let good = good_requests(victim.base());
            let mut requests: Vec<Vec<u8>> = order.iter().map(|&i| good[i].clone()).collect();
            for (which, spoil) in &spoils {
                let which = which.index(requests.len());
                let bytes = &mut requests[which];
                if bytes.is_empty() {
                    continue;
                }
                match spoil {
                    Spoil::Set(at, value) => {
                        let at = at.index(bytes.len());
                        bytes[at] = *value;
                    }
                    Spoil::Field(at, value) => {
                        let at = at.index(bytes.len()) / 8 * 8;
                        let end = (at + 8).min(bytes.len());
                        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
                    }
                    Spoil::Cut(at) => bytes.truncate(at.index(bytes.len())),
                    Spoil::Insert(at, more) => {
                        let at = at.index(bytes.len());
                        bytes.splice(at..at, more.iter().copied());
                    }
                }
            }
            let mut stream = victim.enter();
            let _ = stream.write_all(&requests.concat());
            let said = rest(stream);
            let leaked = said.windows(24).any(|run| run.iter().all(|&byte| byte == SECRET));
            prop_assert!(!leaked, "bytes outside the region were read");
            prop_assert!(victim.is_unharmed(), "bytes outside the region were written");
            // The neighbour's connection, open all the while, serves.
            let mut neighbour = neighbour.borrow_mut();
            let target = victim.base() + 2 * PAGE as u64 - 8;
            neighbour.write_all(&request(Verb::Read, 77, &[(target, 8)], &[])).unwrap();
            let mut answer = [0; Answer::BYTES + 8];
            neighbour.read_exact(&mut answer).unwrap();
            let mut header = [0; Answer::BYTES];
            header.copy_from_slice(&answer[..Answer::BYTES]);
            prop_assert_eq!(Answer::decode(&header).unwrap().id, 77);
            Ok(())
        })?;
    }
}

/// A server that answers whatever it likes does no harm to the one who asks.
#[test]
fn spoiled_answers_are_errors() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answers: [&'static [u8]; 4] = [
        // Another request's number.
        &[0, 0, 0, 0, 0, 0, 0, 0, 99, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0],
        // Too many bytes.
        &[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80],
        // No verdict.
        &[9, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0],
        // Cut off.
        &[0, 0, 0],
    ];
    let server = std::thread::spawn(move || {
        for number in 0.. {
            let (mut stream, _) = listener.accept().unwrap();
            let mut hello = [0; Hello::BYTES];
            if stream.read_exact(&mut hello).is_err() {
                return;
            }
            let mut challenge = vec![8; 32];
            challenge.extend(prove(&[0; 32], End::Server, &hello, &[8; 32]));
            stream.write_all(&challenge).unwrap();
            let mut proof = [0; 32];
            if stream.read_exact(&mut proof).is_err() {
                return;
            }
            let welcome = Welcome { admitted: true, instance: [5; 16], proof_bytes: 0 };
            stream.write_all(&welcome.encode()).unwrap();
            let mut request = [0; Request::BYTES + 16];
            if stream.read_exact(&mut request).is_err() {
                return;
            }
            let mut answer = answers[number % answers.len()].to_vec();
            // The requests of a lane are numbered on, whatever became of its connections.
            if number % answers.len() != 0 && answer.len() > 16 {
                answer[8..16].copy_from_slice(&request[8..16]);
            }
            stream.write_all(&answer).unwrap();
        }
    });
    let mut description = super::DESCRIPTION.to_vec();
    description.extend([5; 16]);
    description.extend([0; 32]);
    crate::bytes::put_block(&mut description, address.to_string().as_bytes());
    let memory = vec![OPEN; PAGE];
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    let base = memory.as_ptr() as u64;
    // SAFETY: the transport is dropped before the memory.
    unsafe { transport.register(Region::host(base, PAGE as u64)) }.unwrap();
    let peer = transport.connect(&description, soon()).unwrap();
    let copy = ByteCopy { source: 4096, destination: base, bytes: 64 };
    let operation = transport.read(&peer, &[copy], None, soon()).unwrap();
    let status = operation.wait(soon());
    assert!(
        matches!(status, Status::Failed(Error::PeerMisbehaved(_) | Error::PeerLost(_))),
        "{status:?}"
    );
    drop(transport);
    assert!(memory.iter().all(|&byte| byte == OPEN));
    // One last connection, to let the server go.
    drop(TcpStream::connect(address));
    server.join().unwrap();
}
