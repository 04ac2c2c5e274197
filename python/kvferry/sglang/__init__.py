"""kvferry as a transfer back end of SGLang: `--disaggregation-transfer-backend kvferry`, and nothing else."""
