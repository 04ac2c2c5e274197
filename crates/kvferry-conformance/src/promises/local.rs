//! What only `local` promises.

use kvferry_testkit::one_by_one;
use kvferry_transport::local::{Local, LocalOptions, Route};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::{ByteCopy, Error, Transport};

use crate::back_end::{BackEnd, LocalEnd};
use crate::data::pattern;
use crate::pair::{MIB, PEER_SEED, done, soon};
use crate::peer::{from_hex, to_hex};

pub(super) fn falls_back_to_tcp_and_says_so() {
    // Not readable by others of the same user; the peer inherits it.
    // SAFETY: a plain request to the kernel about this process.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
    let transport = LocalEnd::new().unwrap();
    let memory = HostMemory::new(5 * MIB).unwrap();
    memory.write(0, &pattern(PEER_SEED, memory.bytes()));
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    unsafe { transport.register(memory.region()) }.unwrap();
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args([crate::CHILD, "reader", LocalEnd::NAME])
        .arg(to_hex(&transport.describe().unwrap()))
        .args([memory.base().to_string(), memory.bytes().to_string()])
        .status()
        .unwrap();
    assert!(status.success());
    drop(transport);
}

/// Reads from a process that the kernel does not let it read: started by the test below.
pub(crate) fn reader(arguments: &[String]) {
    let [description, base, bytes] = arguments else {
        panic!("a reader needs a description, an address and a length");
    };
    // SAFETY: plain calls about this process alone. Root may read every process, so become nobody;
    // somebody else already is not root, and the peer has closed itself to them.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setresuid(65534, 65534, 65534), 0);
        }
    }
    let bytes: usize = bytes.parse().unwrap();
    let ours = HostMemory::new(bytes).unwrap();
    let transport = Local::new(LocalOptions::default()).unwrap();
    // SAFETY: the memory outlives the transport, and is only touched through its address.
    unsafe { transport.register(ours.region()) }.unwrap();
    let peer = transport.connect(&from_hex(description), soon()).unwrap();
    let Route::Tcp { obstacle } = peer.route() else {
        panic!("the kernel should have forbidden this: {peer:?}");
    };
    assert!(matches!(obstacle, Error::System { code: Some(libc::EPERM), .. }), "{obstacle}");
    let copy =
        ByteCopy { source: base.parse().unwrap(), destination: ours.base(), bytes: bytes as u64 };
    done(&transport.read(&peer, &one_by_one(&[copy]), soon()).unwrap());
    assert!(ours.snapshot() == pattern(PEER_SEED, bytes));
    drop(transport);
}
