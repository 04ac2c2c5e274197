//! What plain TCP sockets carry: the yardstick. The end that is read sends to whoever knows its token.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::host;
use super::words::{Came, Sent};

/// How long anything of a connection may stand still.
const PATIENCE: Duration = Duration::from_secs(5);
/// A stranger's time to say the token, and how many may be doing so.
const GREETING: Duration = Duration::from_secs(2);
const CONNECTIONS: u64 = 32;

/// A busy host gives a thread its turn as rarely as that.
const SHORTEST: Duration = Duration::from_millis(200);

/// Sends for as long as the process lives.
pub(super) struct Server {
    pub(super) address: SocketAddr,
    books: Arc<Books>,
}

#[derive(Default)]
struct Books {
    open: AtomicU64,
    sent: Mutex<Sent>,
}

/// Of a connection, until it ends.
struct Place(Arc<Books>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Relaxed);
    }
}

impl Server {
    pub(super) fn start(at: IpAddr, port: u16, token: [u8; 16]) -> io::Result<Self> {
        let listener = TcpListener::bind((at, port))?;
        let server = Self { address: listener.local_addr()?, books: Arc::default() };
        // More than a processor keeps at hand.
        let content: Arc<[u8]> = vec![0x6b; 8 << 20].into();
        let books = server.books.clone();
        thread::Builder::new().name("kvferry-sockets".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else {
                    thread::sleep(Duration::from_millis(50));
                    continue;
                };
                if books.open.fetch_add(1, Relaxed) >= CONNECTIONS {
                    books.open.fetch_sub(1, Relaxed);
                    continue;
                }
                let (place, content) = (Place(books.clone()), content.clone());
                let serve = move || {
                    // It ends when the other end has read enough.
                    _ = send(&stream, token, &content);
                    if let Ok(sent) = host::sent(&stream) {
                        let mut sum = place.0.sent.lock().unwrap_or_else(PoisonError::into_inner);
                        sum.segments += sent.segments;
                        sum.retransmitted += sent.retransmitted;
                    }
                };
                // Where no thread can be had, the connection ends, and the other end says so.
                _ = thread::Builder::new().spawn(serve);
            }
        })?;
        Ok(server)
    }

    /// What was sent, once that has ended.
    pub(super) fn sent(&self) -> Sent {
        let until = Instant::now() + GREETING;
        while self.books.open.load(Relaxed) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(5));
        }
        *self.books.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn send(mut stream: &TcpStream, token: [u8; 16], content: &[u8]) -> io::Result<()> {
    stream.set_read_timeout(Some(GREETING))?;
    let mut said = [0; 16];
    // So few bytes come in one piece. Who sends them one by one has no more time than others.
    if stream.read(&mut said)? != said.len() || said != token {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_write_timeout(Some(PATIENCE))?;
    loop {
        stream.write_all(content)?;
    }
}

/// Reads over so many connections for a while. The first quarter is for TCP to find out what the way carries.
pub(super) fn read(at: SocketAddr, token: [u8; 16], connections: u32, time: Duration) -> Came {
    let mut streams = vec![];
    for _ in 0..connections {
        match connect(at, token) {
            Ok(stream) => streams.push(stream),
            Err(error) => return Came::Unreachable { address: Some(at), why: error.to_string() },
        }
    }
    let time = time.max(SHORTEST);
    // The clock starts when all of them flow.
    let flows = streams.iter().try_for_each(|mut stream| stream.read_exact(&mut [0]));
    if let Err(error) = flows {
        return Came::Failed(broken(&error));
    }
    let (bytes, from) = (AtomicU64::new(0), Instant::now() + time / 4);
    let until = from + time * 3 / 4;
    let problem = thread::scope(|scope| {
        let readers: Vec<_> = streams
            .iter()
            .map(|stream| scope.spawn(|| receive(stream, &bytes, from, until)))
            .collect();
        readers.into_iter().filter_map(|reader| reader.join().ok()?.err()).next()
    });
    let seconds = from.elapsed().as_secs_f64();
    let bytes = bytes.into_inner();
    match problem {
        Some(error) => Came::Failed(broken(&error)),
        None => {
            Came::Bytes { bytes, seconds, gb_per_s: bytes as f64 / seconds / 1e9, packed: false }
        }
    }
}

fn broken(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("no byte came for {} s", PATIENCE.as_secs())
        }
        io::ErrorKind::UnexpectedEof => "the other end closed the connection".to_owned(),
        _ => error.to_string(),
    }
}

fn connect(at: SocketAddr, token: [u8; 16]) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(&token)?;
    Ok(stream)
}

fn receive(
    mut stream: &TcpStream,
    bytes: &AtomicU64,
    from: Instant,
    until: Instant,
) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 20];
    loop {
        let now = Instant::now();
        if now >= until {
            return Ok(());
        }
        let came = stream.read(&mut buffer)?;
        if came == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if now >= from {
            bytes.fetch_add(came as u64, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const TOKEN: [u8; 16] = [7; 16];

    fn server() -> Server {
        Server::start(Ipv4Addr::LOCALHOST.into(), 0, TOKEN).unwrap()
    }

    #[test]
    fn bytes_come_to_who_knows_the_token_and_are_counted() {
        let server = server();
        let Came::Bytes { bytes, .. } = read(server.address, TOKEN, 2, Duration::from_millis(200))
        else {
            panic!("nothing came");
        };
        assert!(bytes > 0 && server.sent().segments > 0);
    }

    #[test]
    fn others_get_nothing_and_do_not_stay() {
        let server = server();
        for said in [&[8; 16][..], &TOKEN[..5], &[]] {
            let mut stranger = TcpStream::connect(server.address).unwrap();
            stranger.set_read_timeout(Some(10 * GREETING)).unwrap();
            stranger.write_all(said).unwrap();
            let got = stranger.read(&mut [0; 16]);
            assert!(got.as_ref().map_or(true, |&got| got == 0), "{got:?}");
        }
        // They are as good as gone, and leave their places.
        server.sent();
        assert_eq!(server.books.open.load(Relaxed), 0);
        let came = read(server.address, [0; 16], 1, Duration::from_millis(50));
        assert!(matches!(came, Came::Failed(_)), "{came:?}");
    }
}
