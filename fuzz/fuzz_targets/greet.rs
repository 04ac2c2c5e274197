//! Any bytes that come first on a data connection are heard, in whatever pieces, and open nothing.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvferry_transport::fuzz::greet(bytes);
});
