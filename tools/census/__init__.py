"""The census: everything in the installed vLLM that keeps a cache, what kvferry makes of it, and what
vLLM's own connector (NixlConnector) does with it.

    tools/census.sh            writes docs/census.md
    tools/census.sh --check    fails where it is not what would be written

Names come from vLLM's source, which is read and not run (`source`): it has parts for GPUs that do not load here.
What kvferry makes of a name is looked up in the connector's own tables, `kvferry.vllm.describe.specs` (`rows`); what vLLM's
connector does is told in `nixl`, each time with the line of its source that shows it.
"""
