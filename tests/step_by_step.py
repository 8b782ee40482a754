"""A server in plain NumPy that reads and answers token by token, as an oracle for replay.

It keeps caches, which training does not have: window keys of every layer by position, entries and
index keys of every KV source, and what an incomplete group waits for. A window is what its cache
holds, so that losing a cache is all there is to replay. Nothing of layouts is known here.
Source: model.md sections 2 and 5. Legend: P positions, c streams, D width, H heads, d head width.
"""

import numpy as np

from deepseek_jax.config import LayerSpec, ModelConfig
from deepseek_jax.ops.rope import frequencies


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def softmax(x, axis=-1):
  e = np.exp(x - x.max(axis=axis, keepdims=True))
  return e / e.sum(axis=axis, keepdims=True)


def best(scores, count):
  """Ids of the largest finite scores, ascending; the lowest id first among equals."""
  order = np.argsort(-scores, kind="stable")[:count]
  return sorted(int(n) for n in order if scores[n] > -np.inf)


class Server:
  """One sequence. Exact numerics (nothing is fake-quantized), float64."""

  def __init__(self, cfg: ModelConfig, variables, hashing, tokens):
    wide = lambda tree: {
      k: wide(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()
    }
    self.cfg, self.tokens = cfg, np.asarray(tokens)
    self.params, self.balance = wide(variables["params"]), wide(variables["balance"])
    self.encoder = cfg.schedule()[: cfg.decoder_start]
    self.decoder = cfg.schedule()[cfg.decoder_start :]
    self.rows = hashing.rows(self.tokens)  # [n, tables, rows of a token]
    layers = range(cfg.num_layers)
    self.window = {layer: {} for layer in layers}  # layer -> position -> key
    self.waiting = {layer: {} for layer in layers}  # layer -> position -> (value, gate)
    self.entries = {layer: [] for layer in layers}
    self.keys = {layer: [] for layer in layers}
    self.handed_over = {}  # position -> what the decoder starts from, made last
    self.first_handed_over = {}  # ... made when the token was read first
    self.read_up_to = 0

  # What a server does.

  def read(self, end):
    """Encoder over the tokens that are new, up to position `end`."""
    self._encode(range(self.read_up_to, end), new=True)
    self.read_up_to = end

  def lose_windows(self):
    """A prefix is found again without its windows: its last tokens go through the encoder anew."""
    assert self.read_up_to > self.cfg.attention.window
    for spec in self.encoder:
      self.window[spec.layer].clear()
    first = self.read_up_to - self.cfg.attention.window
    self._encode(range(first, self.read_up_to), new=False)

  def answer(self, begin, end, *, outputs_kept=False):
    """Hidden states [tokens, D] of the decoder: the end of the prompt, then one token at a time."""
    self.read(begin)
    for spec in self.decoder:
      self.window[spec.layer].clear()
    tail = range(max(0, begin - self.cfg.attention.window), begin)
    found = [self._decode(tail, self.first_handed_over if outputs_kept else self.handed_over)]
    for position in range(begin, end):
      self.read(position + 1)
      found.append(self._decode([position], self.handed_over))
    return np.concatenate(found)

  def _encode(self, positions, *, new):
    positions, cfg = list(positions), self.cfg
    if not positions:
      return
    x_PD = self.params["embed"][self.tokens[positions]]
    streams = np.repeat(x_PD[:, None], cfg.streams, axis=1)
    pre = np.tile(np.eye(cfg.streams)[0], (len(positions), 1))
    choices = {}
    for spec in self.encoder:
      streams, x_PD = self._enter(spec, positions, streams, pre, new)
      streams, pre = self._work(spec, positions, streams, x_PD, choices)
    streams, x_PD = self._enter(self.decoder[0], positions, streams, pre, new)
    for place, position in enumerate(positions):
      self.handed_over[position] = streams[place], x_PD[place]
      if new:
        self.first_handed_over[position] = streams[place], x_PD[place]

  def _decode(self, positions, start):
    positions, choices, pre = list(positions), {}, None
    streams, x_PD = (np.stack(x) for x in zip(*[start[p] for p in positions], strict=True))
    for spec in self.decoder:
      if not spec.starts_decoder:
        streams, x_PD = self._enter(spec, positions, streams, pre, new=False)
      streams, pre = self._work(spec, positions, streams, x_PD, choices)
    return self._norm(self._collapse(streams, pre), self.params["norm"])

  # The model's formulas.

  def _norm(self, x, gain):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.cfg.norm_eps) * gain

  def _collapse(self, streams_PcD, pre_Pc):
    return np.einsum("pcd,pc->pd", streams_PcD, pre_Pc)

  def _rope(self, x, positions, spec, sign=1.0):
    frequency = frequencies(self.cfg.rope, self.cfg.attention.rope_dim, compressed=spec.ratio > 0)
    angle = np.asarray(positions, float)[:, None] * np.asarray(frequency, float)
    turn = np.exp(1j * sign * angle).reshape(len(x), *[1] * (x.ndim - 2), -1)
    turned = x[..., -2 * len(frequency) :]
    turned = (turned[..., ::2] + 1j * turned[..., 1::2]) * turn
    pairs = np.stack([turned.real, turned.imag], axis=-1).reshape(*x.shape[:-1], -1)
    return np.concatenate([x[..., : -2 * len(frequency)], pairs], axis=-1)

  def _mixing(self, w, streams_PcD):
    c, eps = self.cfg.streams, self.cfg.hc_eps
    flat = streams_PcD.reshape(len(streams_PcD), -1)
    scale = 1 / np.sqrt((flat * flat).mean(-1, keepdims=True) + self.cfg.norm_eps)
    mix = flat @ w["fn"].reshape(-1, flat.shape[1]).T * scale
    pre = sigmoid(w["scale"][0] * mix[:, :c] + w["base"][:c]) + eps
    post = 2 * sigmoid(w["scale"][1] * mix[:, c : 2 * c] + w["base"][c : 2 * c])
    comb = (w["scale"][2] * mix[:, 2 * c :] + w["base"][2 * c :]).reshape(-1, c, c)
    comb = softmax(comb) + eps
    comb /= comb.sum(1, keepdims=True) + eps
    for _ in range(self.cfg.sinkhorn_iterations - 1):
      comb /= comb.sum(2, keepdims=True) + eps
      comb /= comb.sum(1, keepdims=True) + eps
    return pre, post, comb

  def _expand(self, y_PD, streams_PcD, post, comb):
    return post[..., None] * y_PD[:, None] + np.einsum("pjk,pjd->pkd", comb, streams_PcD)

  def _enter(self, spec, positions, streams, pre, new):
    """Engram, the input of attention, and new entries where the layer makes some."""
    w = self.params[f"layer_{spec.layer}"]
    if spec.engram is not None:
      streams = self._engram(w["engram"], self.rows[positions, spec.engram], streams)
    x_PD = self._norm(self._collapse(streams, pre), w["attn_norm"])
    if spec.kind == "full":
      self._compress(spec, w["attn"], positions, x_PD, new)
    return streams, x_PD

  def _engram(self, w, rows_PR, streams):
    c, dim = self.cfg.streams, self.cfg.dim
    key_value = w["table"][rows_PR].reshape(len(rows_PR), -1) @ w["wkv"]
    key, value = key_value[:, : c * dim].reshape(-1, c, dim), key_value[:, c * dim :]
    inverse = lambda x: 1 / np.sqrt((x * x).mean(-1) + self.cfg.norm_eps)
    dot = (streams * w["q_weight"] * w["k_weight"] * key).sum(-1)
    dot *= inverse(streams) * inverse(key) * dim**-0.5
    gate = sigmoid(np.sign(dot) * np.sqrt(np.maximum(np.abs(dot), 1e-6)))
    return streams + gate[..., None] * value[:, None]

  def _compress(self, spec, w, positions, x_PD, new):
    m, waiting = spec.ratio, self.waiting[spec.layer]
    for position, x_D in zip(positions, x_PD, strict=True):
      value = x_D @ w["compressor"]["wkv"]
      gate = x_D @ w["compressor"]["wgate"] if m > 1 else np.zeros_like(value)
      waiting[position] = value, gate  # replayed tokens give an incomplete group what it waits for
      if not new or (position + 1) % m:
        continue
      group = [waiting[p] for p in range(position - m + 1, position + 1)]
      values, gates = (np.stack(part) for part in zip(*group, strict=True))
      latent = self._norm((softmax(gates, axis=0) * values).sum(0), w["compressor"]["norm"])
      first = [position - m + 1]
      self.entries[spec.layer].append(self._rope(latent[None], first, spec)[0])
      key = self._norm(latent @ w["indexer"]["wk"], w["indexer"]["k_norm"])
      self.keys[spec.layer].append(self._rope(key[None], first, spec)[0])
      assert len(self.entries[spec.layer]) == (position + 1) // m

  def _work(self, spec, positions, streams, x_PD, choices):
    w = self.params[f"layer_{spec.layer}"]
    pre, post, comb = self._mixing(w["hc_attn"], streams)
    streams = self._expand(
      self._attend(spec, w["attn"], positions, x_PD, choices), streams, post, comb
    )
    x_PD = self._norm(self._collapse(streams, pre), w["ffn_norm"])
    pre, post, comb = self._mixing(w["hc_ffn"], streams)
    bias_E = self.balance[f"layer_{spec.layer}"]["moe"]["bias"]
    return self._expand(self._experts(w["moe"], bias_E, x_PD), streams, post, comb), pre

  def _attend(self, spec: LayerSpec, w, positions, x_PD, choices):
    a = self.cfg.attention
    qr = self._norm(x_PD @ w["wq_a"], w["q_norm"])
    q_PHd = self._rope(np.einsum("pr,rhd->phd", qr, w["wq_b"]), positions, spec)
    kv_Pd = self._rope(self._norm(x_PD @ w["wkv"], w["kv_norm"]), positions, spec)
    window, out = self.window[spec.layer], []
    if spec.kind in ("full", "reindex"):
      self._choose(spec, w["indexer"], positions, x_PD, qr, choices)
    for place, t in enumerate(positions):
      window[t] = kv_Pd[place]
      seen = [window[s] for s in range(t - a.window + 1, t + 1) if s in window]
      if spec.ratio:
        seen += [self.entries[spec.kv_source][n] for n in choices[spec.index_source, t]]
      seen_Nd = np.stack(seen)
      scores_HN = q_PHd[place] @ seen_Nd.T * a.head_dim**-0.5
      p_HN = softmax(np.concatenate([scores_HN, w["sink"][:, None]], axis=1))[:, :-1]
      out.append(p_HN @ seen_Nd)
    o_PHd = self._rope(np.stack(out), positions, spec, -1.0)
    grouped = o_PHd.reshape(len(o_PHd), a.o_groups, -1)
    return np.einsum("pgd,gdo->pgo", grouped, w["wo_a"]).reshape(len(o_PHd), -1) @ w["wo_b"]

  def _choose(self, spec, w, positions, x_PD, qr, choices):
    """choices[layer, position]: ids of entries; choices["pool", position]: blocks."""
    size = self.cfg.indexer
    q_PIi = self._rope(np.einsum("pr,rji->pji", qr, w["wq_b"]), positions, spec)
    weight_PI = x_PD @ w["weights_proj"] * size.head_dim**-0.5 * size.heads**-0.5
    for place, t in enumerate(positions):
      visible = (t + 1) // spec.ratio
      keys = self.keys[spec.kv_source][:visible]
      score = lambda key, n=place: weight_PI[n] @ np.maximum(q_PIi[n] @ key, 0)
      scores_N = np.array([score(key) for key in keys])
      block_N = np.arange(visible) // size.pool_block_size
      if spec.pool == "publish":
        blocks = [scores_N[block_N == b].max() for b in range(block_N.max(initial=-1) + 1)]
        blocks[-1:] = [np.inf] * len(blocks[-1:])  # the newest
        choices["pool", t] = best(np.array(blocks), size.pool_blocks)
      if spec.pool == "restrict":
        scores_N = np.where(np.isin(block_N, choices["pool", t]), scores_N, -np.inf)
      choices[spec.layer, t] = best(scores_N, size.top_k)

  def _experts(self, w, bias_E, x_PD):
    limit = self.cfg.moe.limit
    silu = lambda x: x * sigmoid(x)
    hidden = lambda x, e: silu(np.minimum(x @ e["w1"], limit)) * np.clip(x @ e["w3"], -limit, limit)
    scores_PE = np.sqrt(np.log1p(np.exp(x_PD @ w["gate"])))
    out_PD = hidden(x_PD, w["shared"]) @ w["shared"]["w2"]
    for x_D, scores_E, out_D in zip(x_PD, scores_PE, out_PD, strict=True):
      chosen = np.argsort(-(scores_E + bias_E), kind="stable")[: self.cfg.moe.experts_per_token]
      for e in chosen:
        expert = {name: matrix[e] for name, matrix in w["experts"].items()}
        weight = self.cfg.moe.route_scale * scores_E[e] / scores_E[chosen].sum()
        out_D += weight * (hidden(x_D, expert) @ expert["w2"])
    return out_PD


def serve(cfg, variables, hashing, tokens, turns, hits, *, outputs_kept=False):
  """Hidden states that the decoder gives in all turns of a conversation, one after the other."""
  server, found = Server(cfg, variables, hashing, tokens), []
  for (begin, end), hit in zip(turns, hits, strict=True):
    if hit:
      server.read(hit)
      server.lose_windows()
    found.append(server.answer(begin, end, outputs_kept=outputs_kept))
  return np.concatenate(found)
