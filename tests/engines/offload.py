"""vLLM's OffloadingConnector on a CPU: all of it but the copying, which vLLM has for GPUs only."""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

#: Bytes that this process has stored and loaded.
MOVED = {"store": 0, "load": 0}
#: A child of a MultiConnector.
OFFLOAD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostSpec",
        "spec_module_path": "offload",
        "cpu_bytes_to_use": 64 << 20,
    },
}


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        assert self.blocks_per_chunk == 1
        return HostWorker(kv_caches, self.num_chunks)


class HostWorker(OffloadingWorker):
    def __init__(self, kv_caches, chunks):
        self.caches, self.done = kv_caches, []
        self.host = [
            torch.zeros(chunks, one.tensor.shape[1], dtype=torch.int8) for one in kv_caches.tensors
        ]

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, "store")

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, "load")

    def _copy(self, job, engine, host, way):
        pairs = list(zip(engine.block_ids.tolist(), host.block_ids.tolist(), strict=True))
        size = 0
        for count, refs in zip(engine.group_sizes, self.caches.group_data_refs, strict=True):
            own, pairs = pairs[:count], pairs[count:]
            for ref in refs:
                page = slice(0, ref.page_size_bytes)
                cache = self.caches.tensors[ref.tensor_idx].tensor
                kept = self.host[ref.tensor_idx]
                for block, chunk in own:
                    if way == "store":
                        kept[chunk, page] = cache[block, page]
                    else:
                        cache[block, page] = kept[chunk, page]
                    size += ref.page_size_bytes
        MOVED[way] += size
        self.done.append(TransferResult(job, True, size, 1e-6))
        return True

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        """Everything is done when it is submitted."""
