//! Any bytes decode to a manifest that round-trips, or to an error.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| kvferry_testkit::fuzz::decode_manifest(bytes));
