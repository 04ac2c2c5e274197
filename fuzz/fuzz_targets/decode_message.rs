//! Any bytes are a message that round-trips or an error, and a connection that ends.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvferry_agent::fuzz::decode_message(bytes);
    kvferry_agent::fuzz::connect(bytes);
});
