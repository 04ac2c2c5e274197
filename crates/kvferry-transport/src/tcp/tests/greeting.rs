//! Who is let in, and who is believed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use kvferry_layout::{ByteCopy, Region};
use kvferry_testkit::one_by_one;

use super::super::frame::{Challenge, Hello, VERSION, Verb};
use super::super::proof::{End, Said, Secret};
use super::super::seal::{Direction, TAG};
use super::super::{Tcp, TcpOptions, parse};
use super::{PAGE, TERMS, Victim, described, let_in, now, request, rest, soon};
use crate::contract::{Error, Instance, InvalidFrame, Operation, Status, Transport};
use crate::memory::HostMemory;

#[test]
fn without_the_token_nothing_is_served() {
    let victim = Victim::new();
    // Any byte of it.
    for at in 0..32 {
        let mut stream = victim.connect_with(|_| (), |token| token[at] ^= 1);
        let read = request(Verb::Read, 1, &[(victim.base() + PAGE as u64, 64)]);
        let _ = stream.write_all(&read);
        assert_eq!(rest(stream), [0u8; 0], "byte {at}");
    }
}

/// What one client said opens no second connection, and the token is not among it.
#[test]
fn a_replay_is_not_served() {
    let victim = Victim::new();
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let hello = Hello { nonce: [3; 32], terms: TERMS }.encode();
    let read = request(Verb::Read, 1, &[(victim.base() + PAGE as u64, 64)]);
    let mut first = TcpStream::connect(address.at).unwrap();
    first.write_all(&hello).unwrap();
    let mut challenge = [0; Challenge::BYTES];
    first.read_exact(&mut challenge).unwrap();
    let said = Said { hello, nonce: Challenge::decode(&challenge).unwrap().nonce, terms: TERMS };
    let proof = address.secret.prove(End::Client, &said);
    first.write_all(&proof).unwrap();
    let mut sealed = read;
    let mut direction = Direction::new(TERMS.cipher, address.secret.secrets(&said).of_client);
    let tag = direction.seal(&mut sealed);
    let length = (sealed.len() as u32).to_le_bytes();
    for said in [&length[..], &sealed, &tag] {
        first.write_all(said).unwrap();
    }
    assert_eq!(rest(first).len(), 4 + 24 + TAG + 64);

    let mut second = TcpStream::connect(address.at).unwrap();
    for said in [&hello[..], &proof, &length, &sealed, &tag] {
        let _ = second.write_all(said);
    }
    let said = rest(second);
    assert_ne!(said[..Challenge::BYTES], challenge);
    assert_eq!(said.len(), Challenge::BYTES);
}

/// A server that does not know the token is not believed, whatever it says.
#[test]
fn a_server_must_prove_itself_too() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let secret = Secret { instance: Instance([5; 16]), token: [7; 32] };
    let description = described(&secret, &listener);
    let impostor = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; Hello::BYTES];
        stream.read_exact(&mut hello).unwrap();
        stream.write_all(&Challenge::EMPTY.encode()).unwrap();
        // What it was told beyond the hello.
        let mut told = Vec::new();
        let _ = stream.read_to_end(&mut told);
        told
    });
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    let result = transport.connect(&description, soon());
    assert!(matches!(result, Err(Error::PeerLost(_))), "{result:?}");
    assert!(impostor.join().unwrap().is_empty());
}

#[test]
fn a_hello_that_is_none_ends_the_connection() {
    let victim = Victim::new();
    // The magic.
    let stream = victim.connect(|hello| hello[0] = 0);
    assert_eq!(rest(stream), [0u8; 0]);
    // One that is cut off.
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let mut stream = TcpStream::connect(address.at).unwrap();
    stream.write_all(b"kvf-data").unwrap();
    assert_eq!(rest(stream), [0u8; 0]);
    victim.enter();
}

/// Each end tells the other which version it speaks, so that both can say what is wrong.
#[test]
fn another_version_is_named_at_both_ends() {
    let victim = Victim::new();
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let mut hello = Hello { nonce: [3; 32], terms: TERMS }.encode();
    hello[8] = 9;
    let mut stream = TcpStream::connect(address.at).unwrap();
    stream.write_all(&hello).unwrap();
    let said = rest(stream).try_into().unwrap();
    // It says its version, and proves nothing.
    assert_eq!(Challenge::decode(&said), Ok(Challenge::EMPTY));

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let description = described(&address.secret, &listener);
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut hello = [0; Hello::BYTES];
        stream.read_exact(&mut hello).unwrap();
        let mut challenge = Challenge::EMPTY.encode();
        challenge[8] = 9;
        stream.write_all(&challenge).unwrap();
    });
    let transport = Tcp::new(TcpOptions::default()).unwrap();
    let result = transport.connect(&description, soon());
    let version = InvalidFrame::Version { theirs: 9, ours: VERSION };
    assert_eq!(result.unwrap_err(), Error::PeerMisbehaved(version));
    server.join().unwrap();
}

#[test]
fn silent_connections_keep_nobody_out() {
    let victim = Victim::new();
    let address = parse(&victim.transport.describe().unwrap()).unwrap();
    let silent: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(address.at).unwrap()).collect();
    victim.enter();
    drop(silent);
}

/// One connection is open and waits for an answer, the other is being greeted: whichever thread first
/// notices that both were cut, the read ends because we disconnected, not because the peer was lost.
#[test]
fn what_disconnecting_ends_says_so() {
    let secret = Secret { instance: Instance([5; 16]), token: [7; 32] };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let description = described(&secret, &listener);
    let memory = HostMemory::new(PAGE).unwrap();
    let options = TcpOptions { connections: 2, ..TcpOptions::default() };
    let transport = Tcp::new(options).unwrap();
    // SAFETY: the transport is dropped before the memory.
    unsafe { transport.register(Region::host(memory.base(), PAGE as u64)) }.unwrap();
    for round in 0..40 {
        let accepted = std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let mut open = let_in(&listener, &secret).unwrap();
                assert!(now(open.receive(&mut vec![])).unwrap());
                let (mut silent, _) = listener.accept().unwrap();
                silent.read_exact(&mut [0; Hello::BYTES]).unwrap();
                (open, silent)
            });
            let peer = transport.connect(&description, soon()).unwrap();
            let read = |at| {
                let copy = ByteCopy { source: at, destination: memory.base() + at, bytes: 64 };
                transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap()
            };
            // More than one connection takes on.
            let operations: Vec<_> = (0..16).map(|i| read(i * 256)).collect();
            let accepted = server.join().unwrap();
            transport.disconnect(&peer);
            for operation in operations {
                let status = operation.wait(soon());
                assert_eq!(status, Status::Failed(Error::Disconnected), "round {round}");
            }
            accepted
        });
        drop(accepted);
    }
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
