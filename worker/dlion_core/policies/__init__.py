"""Policies: state machines without I/O for gradients, losses and peers.

Inside: the interface (`interface`), the policies by what they exchange (`gradient`, `weights`,
`hierarchical`), weighting (`aggregation`), waiting (`synchronization`), knowledge transfer
(`knowledge_transfer`) and replicas that trained apart (`partitions`). Outside: TensorFlow, gRPC,
clocks, threads, and the encoding of payloads (`codecs`).

The trainer and the simulator build one `PolicyMachine` per worker, pass it every event, and execute
the returned instructions in order: `MemberJoined` for the peers known at the start, then for each
iteration arriving messages until `waiting_for` is empty, and `LocalStepDone`.
"""
