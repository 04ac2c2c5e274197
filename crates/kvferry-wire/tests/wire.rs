//! Real sockets on both hosts.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use kvferry_wire::{Weather, Wire};

const PATIENCE: Duration = Duration::from_secs(20);
/// So long after the last packet was sent, all have come that come.
const SILENCE: Duration = Duration::from_secs(5);

fn wire() -> Wire {
    Wire::lay(1500).expect("two hosts")
}

/// A datagram socket on each host.
fn sockets(wire: &Wire) -> [UdpSocket; 2] {
    [&wire.left, &wire.right].map(|host| {
        let socket = host.run(|| UdpSocket::bind((host.address, 900))).unwrap().unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    })
}

/// Which of so many numbered packets arrive, in their order.
fn arrive(wire: &Wire, sockets: &[UdpSocket; 2], count: u32) -> Vec<u32> {
    sockets[1].set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let sent = OnceLock::<Instant>::new();
    thread::scope(|scope| {
        // While they are sent: a socket keeps a few hundred at most.
        let receiver = scope.spawn(|| {
            let (mut arrived, mut packet) = (Vec::new(), [0; 4]);
            while arrived.len() < count as usize {
                let late = sent.get().is_some_and(|at| at.elapsed() > SILENCE);
                match sockets[1].recv(&mut packet) {
                    Ok(_) => arrived.push(u32::from_le_bytes(packet)),
                    Err(_) if late => break,
                    Err(_) => {}
                }
            }
            arrived
        });
        for number in 0..count {
            sockets[0].send_to(&number.to_le_bytes(), (wire.right.address, 900)).unwrap();
            thread::sleep(Duration::from_micros(50));
        }
        sent.get_or_init(Instant::now);
        receiver.join().unwrap()
    })
}

#[test]
fn hosts_reach_each_other_and_nothing_else() {
    let wire = wire();
    let sockets = sockets(&wire);
    assert_eq!(arrive(&wire, &sockets, 100), Vec::from_iter(0..100));
    let third = wire.third.run(|| UdpSocket::bind((wire.third.address, 900))).unwrap().unwrap();
    third.set_read_timeout(Some(PATIENCE)).unwrap();
    for socket in &sockets {
        third.send_to(b"word", socket.local_addr().unwrap()).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let (_, from) = socket.recv_from(&mut [0; 4]).unwrap();
        assert_eq!(from, third.local_addr().unwrap());
        socket.send_to(b"back", from).unwrap();
        third.recv(&mut [0; 4]).unwrap();
    }
    // A port of the machine's own loopback.
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = outside.local_addr().unwrap();
    let refused = wire.left.run(|| TcpStream::connect_timeout(&address, PATIENCE)).unwrap();
    assert!(refused.is_err());
}

#[test]
fn weather_is_as_set() {
    let wire = wire();
    let sockets = sockets(&wire);

    wire.set(Weather { delay_ms: 40.0, ..Weather::default() }).unwrap();
    let began = Instant::now();
    sockets[0].send_to(b"word", (wire.right.address, 900)).unwrap();
    sockets[1].recv(&mut [0; 4]).unwrap();
    assert!(began.elapsed() >= Duration::from_millis(40), "{:?}", began.elapsed());

    wire.set(Weather { loss: 0.5, ..Weather::default() }).unwrap();
    let arrived = arrive(&wire, &sockets, 400).len();
    assert!((120..280).contains(&arrived), "{arrived}");

    wire.set(Weather { jitter_ms: 5.0, ..Weather::default() }).unwrap();
    let mut arrived = arrive(&wire, &sockets, 200);
    assert!(!arrived.is_sorted());
    arrived.sort_unstable();
    assert_eq!(arrived, Vec::from_iter(0..200));

    wire.set(Weather { cut: true, ..Weather::default() }).unwrap();
    assert_eq!(arrive(&wire, &sockets, 10), []);
    wire.set(Weather::default()).unwrap();
    assert_eq!(arrive(&wire, &sockets, 10), Vec::from_iter(0..10));
}

#[test]
fn a_rate_holds_and_every_byte_arrives() {
    let wire = wire();
    const BYTES: usize = 2_000_000;
    wire.set(Weather { rate: Some(4e6), delay_ms: 1.0, ..Weather::default() }).unwrap();
    let listener = wire.right.run(|| TcpListener::bind((wire.right.address, 0))).unwrap().unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut stream = listener.accept().unwrap().0;
            let sent: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
            stream.write_all(&sent).unwrap();
        });
        let mut stream =
            wire.left.run(|| TcpStream::connect_timeout(&address, PATIENCE)).unwrap().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut received = Vec::new();
        stream.read_to_end(&mut received).unwrap();
        assert!(received.iter().enumerate().all(|(at, byte)| *byte == (at % 251) as u8));
        assert_eq!(received.len(), BYTES);
    });
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}

#[test]
fn weather_that_makes_no_sense_is_refused() {
    let wire = wire();
    for (weather, says) in [
        (Weather { loss: 1.5, ..Weather::default() }, "loss is 1.5"),
        (Weather { delay_ms: -1.0, ..Weather::default() }, "delay_ms is -1"),
        (Weather { rate: Some(0.0), ..Weather::default() }, "rate is 0"),
        (Weather { jitter_ms: f64::NAN, ..Weather::default() }, "jitter_ms is NaN"),
    ] {
        assert_eq!(wire.set(weather).unwrap_err().to_string(), says);
    }
}
