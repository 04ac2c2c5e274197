//! What a client does with answers that are not right.

use std::net::{TcpListener, TcpStream};

use kvferry_layout::{ByteCopy, Region};
use kvferry_testkit::one_by_one;

use super::super::proof::Secret;
use super::super::{Tcp, TcpOptions};
use super::{OPEN, PAGE, described, let_in, now, soon};
use crate::contract::{Error, Instance, Operation, Status, Transport};
use crate::memory::HostMemory;

/// A server that answers whatever it likes does no harm to the one who asks.
#[test]
fn spoiled_answers_are_errors() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
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
    let secret = Secret { instance: Instance([5; 16]), token: [0; 32] };
    let description = described(&secret, &listener);
    let server = std::thread::spawn(move || {
        for number in 0.. {
            let Ok(mut channel) = let_in(&listener, &secret) else { return };
            let mut request = vec![];
            if !matches!(now(channel.receive(&mut request)), Ok(true)) {
                return;
            }
            let id: [u8; 8] = request[8..16].try_into().unwrap();
            let mut answer = answers[number % answers.len()].to_vec();
            // The requests of a lane are numbered on, whatever became of its connections.
            if number % answers.len() != 0 && answer.len() > 16 {
                answer[8..16].copy_from_slice(&id);
            }
            now(channel.send(&answer)).unwrap();
        }
    });
    let memory = HostMemory::new(PAGE).unwrap();
    memory.write(0, &[OPEN; PAGE]);
    let transport = Tcp::new(TcpOptions { connections: 1, ..TcpOptions::default() }).unwrap();
    let base = memory.base();
    // SAFETY: the transport is dropped before the memory.
    unsafe { transport.register(Region::host(base, PAGE as u64)) }.unwrap();
    let peer = transport.connect(&description, soon()).unwrap();
    let copy = ByteCopy { source: 4096, destination: base, bytes: 64 };
    let operation = transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap();
    let status = operation.wait(soon());
    assert!(
        matches!(status, Status::Failed(Error::PeerMisbehaved(_) | Error::PeerLost(_))),
        "{status:?}"
    );
    drop(transport);
    assert!(memory.snapshot() == [OPEN; PAGE]);
    // One last connection, to let the server go.
    drop(TcpStream::connect(address));
    server.join().unwrap();
}
