//! Pairs of which it was seen what becomes of them.

use super::*;
use crate::presets;
use crate::rules::topology::Topology;
use crate::rules::vllm;

fn outcome(model: &str, prefill: &str, decode: &str) -> Outcome {
    let model = presets::find(model).unwrap().model().unwrap();
    let (prefill, decode): (Topology, Topology) =
        (prefill.parse().unwrap(), decode.parse().unwrap());
    let pools = |topology| vllm::pools(&model, topology).unwrap();
    let (one, other) = (pools(&prefill), pools(&decode));
    let prefill = EngineSide { topology: &prefill, pools: &one };
    let decode = EngineSide { topology: &decode, pools: &other };
    judge(&model, prefill, decode, 0).outcome
}

#[test]
fn known_pairs_are_judged_as_they_were_seen() {
    use Outcome::{Refuses, SilentlyWrong, Works};
    for (model, prefill, decode, expected) in [
        ("llama-3.1-8b", "tp=4", "tp=2", Works),
        ("llama-3.1-8b", "tp=2", "tp=4", Works),
        ("llama-3.1-8b", "tp=16", "tp=2", Refuses),
        ("llama-3.1-8b", "tp=2,layout=LBNHC", "tp=4,layout=LBNHC", Refuses),
        ("llama-3.1-8b", "tp=2,layout=LBNHC", "tp=2,layout=LBNHC", Works),
        ("llama-3.1-8b", "tp=1,block=32", "tp=1,block=16", Refuses),
        ("llama-3.1-8b", "tp=1,block=16", "tp=1,block=32", Works),
        ("llama-3.1-8b", "tp=1,pp=2", "tp=1", Works),
        ("llama-3.1-8b", "tp=16,dcp=2", "tp=8", Refuses),
        ("deepseek-v3", "tp=8,dcp=8", "tp=8", Works),
        ("deepseek-v3", "tp=8,dcp=4", "tp=8", Refuses),
        ("deepseek-v3", "pcp=4", "tp=8", Works),
        ("deepseek-v3", "pcp=4,dcp=4", "tp=8", Works),
        ("deepseek-v3", "pcp=4", "tp=8,dcp=8", Refuses),
        ("deepseek-v3", "tp=8", "pcp=2", Refuses),
        ("kimi-linear", "tp=4,dcp=4", "tp=4", Refuses),
        ("llama-3.1-8b", "tp=1", "tp=1,pp=2", Refuses),
        ("kimi-linear", "tp=4", "tp=2,pp=2", Refuses),
        ("kimi-linear", "tp=4", "tp=2", Works),
        ("kimi-k3", "tp=6", "tp=4", Refuses),
        ("falcon-h1-7b", "tp=4", "tp=2", SilentlyWrong),
        ("falcon-h1-7b", "tp=2", "tp=2", Works),
        ("llama-3.1-8b", "tp=4,block=16", "tp=2,block=32", Refuses),
        ("granite-4.0-h-tiny", "tp=2,kernel=16", "tp=1,kernel=16", SilentlyWrong),
        ("nemotron-h-8b", "tp=4,kernel=16", "tp=2,kernel=16", Works),
        ("nemotron-h-8b", "tp=4,conv=sd", "tp=4", Refuses),
        ("qwen3-next", "tp=2,spec=1", "tp=2", SilentlyWrong),
        ("lfm2-1.2b", "tp=2", "tp=2", Refuses),
        ("minimax", "tp=2", "tp=2", Refuses),
        ("gemma-3", "tp=2,pp=2", "tp=2", Refuses),
        ("llama-3.1-8b", "tp=2,kv=fp8", "tp=2", Refuses),
        ("llama-3.1-8b", "tp=2,kv=nvfp4", "tp=4,kv=nvfp4", Works),
        ("llama-3.1-8b", "tp=2,kv=fp8,kscale=2", "tp=2,kv=fp8", SilentlyWrong),
        ("deepseek-v4-flash", "tp=8", "tp=2", Works),
        ("deepseek-v4-flash", "pp=2", "tp=2", Refuses),
        ("deepseek-v4.1", "tp=2", "tp=8", Works),
    ] {
        assert_eq!(outcome(model, prefill, decode), expected, "{model} {prefill} {decode}");
    }
}
