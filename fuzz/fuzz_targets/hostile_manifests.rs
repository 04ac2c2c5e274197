//! Good manifests with hostile numbers are refused, or their plans stay in bounds.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvferry_testkit::fuzz::hostile_manifests(bytes);
});
