//! What only `nixl` promises, and why it keeps destinations in quarantine.

use std::time::Duration;

use kvferry_nixl::{Nixl, NixlOptions, capi, find};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::{Error, Place, Transport};

use crate::back_end::NixlTcpEnd;
use crate::data::pattern;
use crate::pair::{MIB, PEER_SEED, Pair, done, soon};
use crate::peer::{Peer, wait_until};

pub(super) fn a_missing_plugin_is_named() {
    // SAFETY: no other thread runs in this process yet.
    unsafe { std::env::set_var("NIXL_PLUGIN_DIR", "/nonexistent/plugins") };
    let Err(Error::Library(message)) = Nixl::new(&NixlOptions::default()) else {
        panic!("a plugin was loaded that is not there");
    };
    let file = "/nonexistent/plugins/libplugin_UCX.so: it is not there";
    assert!(message.contains(file), "{message}");
    assert!(message.contains("kvferry nixl install"), "{message}");
}

/// Memory that is registered anew has other keys, also at the same address: what NIXL knows of a peer is replaced
/// whenever its metadata is another, and comes back after metadata that NIXL cannot load.
pub(super) fn other_metadata_is_loaded() {
    let pair = Pair::<NixlTcpEnd>::new(MIB);
    // What has not changed is not loaded again.
    assert_eq!(pair.transport.describe(), pair.transport.describe());
    let good = &pair.process.description;
    // Behind 8 + 16 bytes of names, 4 of a count and the regions.
    let regions = u32::from_le_bytes(good[24..28].try_into().unwrap()) as usize;
    let metadata = b"not NIXL's";
    let mut other = good[..28 + 20 * regions].to_vec();
    other.extend((metadata.len() as u32).to_le_bytes());
    other.extend(metadata);
    other.extend(&good[good.len() - 16..]);
    let result = pair.transport.connect(&other, soon());
    assert!(matches!(result, Err(Error::BadDescription(_))), "{result:?}");
    pair.transport.connect(good, soon()).unwrap();
    done(&pair.read_all());
    assert!(pair.ours.snapshot() == pattern(PEER_SEED, MIB));
}

/// UCX's TCP writes beyond its buffer where a peer sends longer segments than it has room for.
pub(super) fn segments_without_room_are_refused() {
    let pair = Pair::<NixlTcpEnd>::new(MIB);
    // At the end: what it sends at most, and what it has room for.
    let good = &pair.process.description;
    let (rest, numbers) = good.split_at(good.len() - 16);
    let numbers: Vec<u64> =
        numbers.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())).collect();
    assert_eq!(numbers, [4 << 20, 4 << 20]);
    for (numbers, said) in
        [([5 << 20, 4 << 20], "the peer sends"), ([8192, 8192], "this process sends")]
    {
        let numbers: Vec<u8> = numbers.into_iter().flat_map(u64::to_le_bytes).collect();
        match pair.transport.connect(&[rest, &numbers].concat(), soon()) {
            Err(Error::Unsupported(why)) => assert!(why.contains(said), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    pair.transport.connect(good, soon()).unwrap();
}

/// Not a promise but the reason for one: NIXL's own interface lets a request go, and its bytes land
/// afterwards. If this test ever fails, quarantine can be made cheaper.
pub(super) fn released_requests_of_nixl_land_late() {
    let bytes = 64 * MIB;
    let process = Peer::start::<NixlTcpEnd>(bytes, PEER_SEED);
    // SAFETY: the library that whoever tests has named or installed.
    let library = unsafe { capi::Nixl::load(&find(None).unwrap()) }.unwrap();
    // With NIXL's own default of no threads besides its progress thread.
    let mut settings = NixlOptions::default().settings();
    settings.parameters.retain(|(key, _)| key.starts_with("ucx") || key == "engine_config");
    let agent = capi::Agent::new(&library, "bare", &settings).unwrap();
    let agent = std::sync::Arc::new(agent);
    let ours = HostMemory::new(bytes).unwrap();
    let span = (ours.base(), bytes as u64, Place::Host);
    // SAFETY: the memory outlives the agent, and is only touched through its address.
    unsafe { agent.register(span) }.unwrap();
    // The metadata is the last block of the description, behind 8 + 16 bytes of names, 4 of a count
    // and 20 for each region. What kvferry puts behind it does not disturb NIXL.
    let count = process.description[24..28].try_into().unwrap();
    let regions = 20 * u32::from_le_bytes(count) as usize;
    let name = agent.load(&process.description[8 + 16 + 4 + regions + 4..]).unwrap();
    let theirs = (process.base, bytes as u64, Place::Host);
    // SAFETY: both spans are registered, here and by the peer, until the end.
    let request =
        || unsafe { agent.request(&name, [span].into_iter(), [theirs].into_iter()).unwrap() };
    // Once to connect.
    let mut first = request();
    let mut ended = first.post().unwrap();
    wait_until("the first read is done", || {
        ended = ended || first.ended().unwrap();
        ended
    });
    process.stop();
    let mut second = request();
    assert!(!second.post().unwrap());
    std::thread::sleep(Duration::from_millis(100));
    drop(second);
    agent.forget(&name).unwrap();
    ours.write(0, &vec![0xaa; bytes]);
    process.resume();
    wait_until("bytes land although the request was released", || {
        ours.snapshot() == pattern(PEER_SEED, bytes)
    });
    drop(first);
    agent.deregister(span).unwrap();
    drop(agent);
}
