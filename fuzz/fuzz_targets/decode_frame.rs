//! Any bytes decode to frames of the data protocol that round-trip, or to an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvferry_transport::fuzz::decode_frame(bytes);
});
