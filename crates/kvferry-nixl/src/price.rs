//! What NIXL takes for a read.

use kvferry_layout::Price;

use kvferry_transport::shared::rate::Medium;

/// GPU memory: UCX carries each copy out by itself, over `cuda_ipc`. Fitted to transfers of real plans
/// between two processes on one H200, November 2026: see the tests.
const GPU: Price = Price { launch: 100_000.0, copy: 7_000.0, byte: 0.0006 };

/// Host memory of this host (UCX reads it through the kernel), as in docs/measured/lowering-2026-11-18.json: a virtual
/// machine with two cores. Over UCX's own TCP it was 27 µs, 2.3 µs and 0.59 ns.
const HOST: Price = Price { launch: 10_000.0, copy: 1_550.0, byte: 0.24 };

/// Host memory over an RDMA card, without the bytes: NVIDIA's users report a twentieth of `cuda_ipc`
/// for a copy (vllm#55434). Not measured here.
const RDMA: Price = Price { launch: 10_000.0, copy: 350.0, byte: 0.0 };

/// What a read takes, by whether GPU memory is involved and by what carries it.
pub(super) fn price(gpu: bool, medium: Medium) -> Price {
    if gpu {
        return GPU;
    }
    match medium.byte() {
        Some(byte) => Price { byte, ..RDMA },
        None => HOST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies, bytes and milliseconds of warm transfers through this back end on an H200.
    const MEASURED: [(u64, f64, f64); 14] = [
        (508, 99e6, 3.71),
        (1_216, 854e6, 9.44),
        (512, 88e6, 3.86),
        (2_192, 1.08e9, 18.0),
        (708, 111e6, 6.04),
        (40_960, 336e6, 317.0),
        (655_360, 5.37e9, 3_749.0),
        (81_920, 671e6, 598.0),
        (40_960, 671e6, 312.0),
        (80, 671e6, 1.10),
        (65_536, 537e6, 363.0),
        (147_618, 1.21e9, 895.0),
        (655_360, 336e6, 3_617.0),
        (368_792, 88e6, 2_606.0),
    ];

    #[test]
    fn the_price_of_gpu_memory_is_what_was_measured() {
        let price = price(true, Medium::Nixl(None));
        for (copies, bytes, millis) in MEASURED {
            let ratio = price.of(copies, bytes as u64) / (millis * 1e6);
            assert!((0.75..1.3).contains(&ratio), "{copies} copies, {bytes} bytes: {ratio}");
        }
    }

    #[test]
    fn a_card_says_what_a_byte_costs() {
        assert_eq!(price(false, Medium::Nixl(Some(50e9))).byte, 0.02);
        assert_eq!(price(false, Medium::Nixl(None)), HOST);
    }
}
