//! Any request against a plan is an error, or stays in bounds.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    kvferry_testkit::fuzz::request_against_plan(bytes);
});
