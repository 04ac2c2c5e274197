//! What seals the frames of a connection, and the bytes that are moved where that was agreed: authenticated encryption,
//! with a key for each connection and direction.
//!
//! Both keys come from the token, which peers are told over a channel of their own, and from all that was said in the
//! greeting: two nonces that are new for every connection. Records are numbered, so that none can be left out, repeated
//! or come in another order, and a key makes place for the next long before what its cipher is good for.

use std::net::IpAddr;

use hmac::{Hmac, Mac};
use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use sha2::Sha256;

use crate::contract::InvalidFrame;

/// What a record is longer than what it carries.
pub(crate) const TAG: usize = 16;
/// Records of one key: of the longest ones 64 GiB, 2^32 of AES's blocks. (RFC 8446 has TLS change keys after 2^34.5.)
const RECORDS_OF_A_KEY: u64 = 1 << 19;

/// Whether the bytes that are moved are encrypted on their way. What is said about them always is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encrypt {
    /// Never, unless the peer wants it.
    Never,
    /// Where the peer's address is not a loopback one.
    #[default]
    BetweenHosts,
    /// Always.
    Always,
}

impl Encrypt {
    pub(crate) fn with(self, peer: IpAddr) -> bool {
        match self {
            Self::Never => false,
            Self::BetweenHosts => !peer.to_canonical().is_loopback(),
            Self::Always => true,
        }
    }
}

/// What both ends agree upon in the greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) cipher: Cipher,
    /// Whether the bytes that are moved are sealed. Frames always are.
    pub(crate) content: bool,
}

impl Terms {
    /// What two ends agree upon: content is sealed where either wants it, by AES where both are fast at it.
    pub(crate) fn with(self, other: Self) -> Self {
        let cipher = if self.cipher == other.cipher { self.cipher } else { Cipher::ChaCha };
        Self { cipher, content: self.content || other.content }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cipher {
    /// AES-128-GCM, where both processors have instructions for it. Longer keys would be slower, and no stronger than how the
    /// token was exchanged.
    Aes,
    /// ChaCha20-Poly1305.
    ChaCha,
}

impl Cipher {
    /// The faster one on this processor.
    pub(crate) fn of_this_processor() -> Self {
        #[cfg(target_arch = "x86_64")]
        let aes = is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        let aes = std::arch::is_aarch64_feature_detected!("aes")
            && std::arch::is_aarch64_feature_detected!("pmull");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        let aes = false;
        if aes { Self::Aes } else { Self::ChaCha }
    }
}

/// The secrets of a connection's two directions.
#[derive(Clone)]
pub(crate) struct Secrets {
    pub(crate) of_client: [u8; 32],
    pub(crate) of_server: [u8; 32],
}

/// One direction of a connection.
pub(crate) struct Direction {
    cipher: Cipher,
    secret: [u8; 32],
    key: LessSafeKey,
    records: u64,
    records_of_a_key: u64,
}

impl Direction {
    pub(crate) fn new(cipher: Cipher, secret: [u8; 32]) -> Self {
        let key = key(cipher, &secret);
        Self { cipher, secret, key, records: 0, records_of_a_key: RECORDS_OF_A_KEY }
    }

    /// The number of the next record, as the cipher wants it; before that the next key, if it is due.
    fn number(&mut self) -> Nonce {
        if self.records == self.records_of_a_key {
            self.secret = derive(&self.secret, b"kvferry next secret\0");
            self.key = key(self.cipher, &self.secret);
            self.records = 0;
        }
        let mut number = [0; aead::NONCE_LEN];
        number[..8].copy_from_slice(&self.records.to_le_bytes());
        self.records += 1;
        Nonce::assume_unique_for_key(number)
    }

    /// Seals a record where it lies, and returns its tag.
    pub(crate) fn seal(&mut self, bytes: &mut [u8]) -> [u8; TAG] {
        let number = self.number();
        let tag = self.key.seal_in_place_separate_tag(number, Aad::empty(), bytes);
        let tag = tag.expect("a record is shorter than what a cipher takes");
        tag.as_ref().try_into().expect("both ciphers have tags of 16 bytes")
    }

    /// Opens a record where it lies. What does not open is no longer of use, and nor is the connection.
    pub(crate) fn open(&mut self, bytes: &mut [u8], tag: [u8; TAG]) -> Result<(), InvalidFrame> {
        let number = self.number();
        let opened =
            self.key.open_in_place_separate_tag(number, Aad::empty(), tag.into(), bytes, 0..);
        opened.map(|_| ()).map_err(|_| InvalidFrame::Changed)
    }
}

fn key(cipher: Cipher, secret: &[u8; 32]) -> LessSafeKey {
    let algorithm = match cipher {
        Cipher::Aes => &aead::AES_128_GCM,
        Cipher::ChaCha => &aead::CHACHA20_POLY1305,
    };
    let bytes = derive(secret, b"kvferry record key\0");
    let key = UnboundKey::new(algorithm, &bytes[..algorithm.key_len()]);
    LessSafeKey::new(key.expect("it is as long as the cipher wants it"))
}

/// What follows from a secret for one purpose.
pub(crate) fn derive(secret: &[u8; 32], purpose: &[u8]) -> [u8; 32] {
    let mac = <Hmac<Sha256> as Mac>::new_from_slice(secret).expect("HMAC takes keys of any length");
    mac.chain_update(purpose).finalize().into_bytes().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both(cipher: Cipher) -> (Direction, Direction) {
        let mut both = (Direction::new(cipher, [7; 32]), Direction::new(cipher, [7; 32]));
        both.0.records_of_a_key = 3;
        both.1.records_of_a_key = 3;
        both
    }

    /// The construction, told apart from ring: a record of this key and number by the standards' own words, computed with
    /// Python's `cryptography` 50: HMAC-SHA256 of 32 bytes of 7 over `kvferry record key\0`, or as much of it as the cipher takes, as the key, the number 0, no
    /// additional data.
    #[test]
    fn records_are_what_others_would_make_of_them() {
        let sealed = |cipher| {
            let mut bytes = *b"kvferry";
            let tag = Direction::new(cipher, [7; 32]).seal(&mut bytes);
            [&bytes[..], &tag].concat().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        assert_eq!(sealed(Cipher::Aes), AES);
        assert_eq!(sealed(Cipher::ChaCha), CHACHA);
    }
    const AES: &str = "46cfd00fa0b3d3e2824774ac1a66c7e05f54c654a0270e";
    const CHACHA: &str = "c7c1c627b719317dedcfa4fe5b8d58f667868960e98b15";

    /// Keys follow each other at both ends, and none seals two records by one number.
    #[test]
    fn keys_are_renewed_at_both_ends() {
        for cipher in [Cipher::Aes, Cipher::ChaCha] {
            let (mut from, mut to) = both(cipher);
            let mut seen = std::collections::HashSet::new();
            for round in 0..20 {
                let mut bytes = [0; 100];
                let tag = from.seal(&mut bytes);
                assert!(seen.insert(bytes), "round {round} is sealed as another was");
                to.open(&mut bytes, tag).unwrap();
                assert_eq!(bytes, [0; 100]);
            }
        }
    }

    proptest! {
        /// Whatever is done to a sequence of records, what opens is what was sealed, in its place.
        #[test]
        fn what_was_changed_does_not_open(
            lengths in prop::collection::vec(0usize..70, 1..12),
            is_aes in any::<bool>(),
            (at, bit) in (any::<prop::sample::Index>(), 0u8..8),
            (other, act) in (any::<prop::sample::Index>(), 0..4),
        ) {
            let (mut from, mut to) = both(if is_aes { Cipher::Aes } else { Cipher::ChaCha });
            let plain: Vec<Vec<u8>> =
                lengths.iter().enumerate().map(|(i, &n)| vec![i as u8; n]).collect();
            let mut records: Vec<(Vec<u8>, [u8; TAG])> = plain
                .iter()
                .map(|bytes| {
                    let mut bytes = bytes.clone();
                    let tag = from.seal(&mut bytes);
                    (bytes, tag)
                })
                .collect();
            // From here on nothing may open.
            let first = at.index(records.len());
            match act {
                0 => {
                    let (bytes, tag) = &mut records[first];
                    let whole = bytes.len() + TAG;
                    let byte = other.index(whole);
                    let byte = bytes.get_mut(byte).unwrap_or(&mut tag[byte.saturating_sub(whole - TAG)]);
                    *byte ^= 1 << bit;
                }
                1 => {
                    records.remove(first);
                }
                2 => {
                    let again = records[first].clone();
                    records.insert(first, again);
                }
                _ => {
                    let (bytes, _) = &mut records[first];
                    if bytes.pop().is_none() {
                        bytes.push(0);
                    }
                }
            }
            let good = if act == 2 { first + 1 } else { first };
            for (number, (mut bytes, tag)) in records.into_iter().enumerate() {
                let opened = to.open(&mut bytes, tag);
                if number < good {
                    prop_assert_eq!(opened, Ok(()));
                    prop_assert_eq!(&bytes, &plain[number]);
                } else {
                    prop_assert_eq!(opened, Err(InvalidFrame::Changed));
                    break;
                }
            }
        }
    }
}
