"""Every configuration key with its unit; `get_config()` is what a config file starts from.

The values come from the frozen dataclasses, so that no default is written twice.
`python -m train pretrain --help` prints the table below with the defaults beside it.
"""

import dataclasses
from typing import Any

import ml_collections

from configs.schema import Settings

UNITS = {
  "model.vocab": "token ids",
  "model.dim": "channels of the residual streams",
  "model.streams": "residual streams",
  "model.compress_ratios": "tokens per compressed entry, one number per layer; 0: window only",
  "model.kv_sources": "layers that make compressed entries",
  "model.index_sources": "layers that choose entries",
  "model.decoder_start": "first layer of the decoder; None: every layer reads every slot",
  "model.norm_eps": "added to mean squares",
  "model.init_std": "standard deviation of initial matrices, embeddings and tables",
  "model.sinkhorn_iterations": "row and column normalizations",
  "model.hc_eps": "added to the sums of the hyper-connection weights",
  "model.attention.heads": "query heads",
  "model.attention.head_dim": "channels",
  "model.attention.rope_dim": "channels, the last ones of a head",
  "model.attention.q_rank": "channels of the query latent",
  "model.attention.o_rank": "channels of the output latent of a group",
  "model.attention.o_groups": "groups of heads",
  "model.attention.window": "slots, the query's own included",
  "model.rope.theta": "base wavelength of layers without entries, in tokens",
  "model.rope.compress_theta": "base wavelength of layers with entries, in tokens",
  "model.rope.yarn_factor": "context extension, a factor",
  "model.rope.yarn_beta_fast": "rotations above which YaRN leaves a frequency as it is",
  "model.rope.yarn_beta_slow": "rotations below which YaRN divides a frequency by the factor",
  "model.rope.yarn_original_length": "tokens",
  "model.indexer.heads": "heads",
  "model.indexer.head_dim": "channels",
  "model.indexer.top_k": "entries per query",
  "model.indexer.pool_source": "layer that publishes the candidate pool; None: no pool",
  "model.indexer.pool_blocks": "blocks",
  "model.indexer.pool_block_size": "entries per block",
  "model.moe.experts": "routed experts",
  "model.moe.experts_per_token": "routed experts per token",
  "model.moe.hidden": "channels of one expert",
  "model.moe.route_scale": "factor on the routed sum",
  "model.moe.limit": "clamp of the gate and up projections",
  "model.moe.receive_factor": "rows a device takes at a time for its experts, over an even load",
  "model.engram.layers": "layers before which a table is read",
  "model.engram.table_rows": "rows of each table: the sum of its hash primes",
  "model.engram.max_ngram": "tokens of the longest n-gram",
  "model.engram.heads": "hash heads per n-gram order",
  "model.engram.head_dim": "channels of one row",
  "model.engram.prime_start": "hash moduli are the primes from here on",
  "model.engram.pad_token": "token id",
  "model.engram.compressed_vocab": "classes of the tokenizer's compression map",
  "model.numerics.compute_dtype": "float32 or bfloat16",
  "model.numerics.window_fp8": "on or off: window entries in E4M3",
  "model.numerics.main_fp4": "on or off: compressed entries in E2M1",
  "model.numerics.indexer_fp4": "on or off: indexer queries and keys in E2M1",
  "model.numerics.scores_bf16": "on or off: indexer scores rounded",
  "model.numerics.activations_fp8": "on or off: inputs of linears in E4M3",
  "model.scan_layers": "on or off: equal groups of layers compiled once",
  "model.remat": "none, block or block_keep_results: what the backward pass computes again",
  "data.paths": "folders written by `python -m train prepare`",
  "data.weights": "share of the rows that each folder gives, any scale; empty: equal shares",
  "data.slots": "tokens per row",
  "data.batch_rows": "rows per step, over all devices",
  "data.shuffle_seed": "any integer from 0 on",
  "data.max_damaged_records": "records per host that are skipped before the run stops",
  "data.reader_threads": "threads per host",
  "data.prefetch_batches": "batches per host that are built ahead",
  "data.stall_seconds": "seconds, longest wait for a batch",
  "objective.balance_weight": "weight of the balance loss, against nats per token",
  "objective.indexer": "off or sparse: loss of the indexer",
  "objective.indexer_weight": "weight of the indexer loss, against nats per token",
  "objective.vocab_chunk_tokens": "tokens whose logits exist at a time",
  "optim.peak_lr": "change of a weight per step, before normalization by the gradient's size",
  "optim.warmup_steps": "steps",
  "optim.final_lr": "like peak_lr",
  "optim.beta1": "decay of the mean gradient per step",
  "optim.beta2": "decay of the mean squared gradient per step",
  "optim.eps": "added to the root of the mean squared gradient",
  "optim.weight_decay": "share of a weight per step, times the learning rate",
  "optim.clip_norm": "largest norm of the global gradient",
  "optim.bias_speed": "change of a router bias per step",
  "mesh.replica": "devices",
  "mesh.fsdp": "devices",
  "mesh.expert": "devices",
  "mesh.context": "devices",
  "mesh.tensor": "devices",
  "checkpoint.every_steps": "steps between two saves",
  "checkpoint.keep_last": "newest checkpoints that are kept",
  "checkpoint.keep_every": "steps; checkpoints at multiples of it are kept for good, 0: none",
  "checkpoint.on_error": "stop or continue after a failed save",
  "validation.every_steps": "steps between two validations, 0: none",
  "validation.rows": "rows of the validation split",
  "log.observed_queries": "queries of a row whose attention is measured; 0: no health metrics",
  "log.every_steps": "steps between two lines on the screen (metrics.jsonl has every step)",
  "profile.start_step": "first step that is profiled",
  "profile.steps": "steps that are profiled, 0: none",
  "total_steps": "optimizer steps",
  "accumulation": "pieces that a step's rows are computed in, one after the other",
  "seed": "any integer; initial weights",
  "max_skipped_steps": "steps in a row with a gradient that is not finite, before the run stops",
}


def get_config() -> Any:
  """A locked ConfigDict of all keys with the release's values: a misspelt key fails at its line.

  Types are not checked here but in train/settings.py, which can name every wrong one at once.
  """
  return ml_collections.ConfigDict(dataclasses.asdict(Settings()), type_safe=False).lock()
