"""The steps that both passes over the chunks share. Names and numbers of equations are those of docs/scan.md;
`chunk_loads` says which lane holds what."""

import triton
import triton.language as tl

from .chunk_loads import kept_projection
from .fragments import exp2, from_lane, high, low, packed, product_8, product_16, transposed
from .lanes import LOG2E, MAX_EXPONENT, reciprocal

SIGNS = tl.constexpr(-2147450880)  # the sign bits of both halves of a word


@triton.jit
def sum_of(o, other):
    return (o[0] + other[0], o[1] + other[1], o[2] + other[2], o[3] + other[3])


@triton.jit
def numbers(words, cp: tl.constexpr, form):
    """Makes float32 of the words of `load_pair`: a tile's tokens, laid out as C."""
    return low(words[cp]), low(words[form.CP + cp]), high(words[cp]), high(words[form.CP + cp])


@triton.jit
def times_skip(x, skip, cp: tl.constexpr):
    return (x[0] * skip[2 * cp], x[1] * skip[2 * cp], x[2] * skip[2 * cp + 1], x[3] * skip[2 * cp + 1])


@triton.jit
def over_states(c, a, b, NP: tl.constexpr):
    """Returns c + A B, summed over the states; `a` has, for each word of states, the words of rows g and g + 8."""
    for j in tl.static_range(NP // 2):
        c = product_16(c, a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3], b[2 * j], b[2 * j + 1])
    if NP % 2 == 1:
        c = product_8(c, a[2 * NP - 2], a[2 * NP - 1], b[NP - 1])
    return c


@triton.jit
def words_of(S, NP: tl.constexpr):
    """Rounds a tile's states to bfloat16, as the left operand of a product."""
    words = ()
    for i in tl.static_range(2 * NP):
        words = words + (packed(S[2 * i], S[2 * i + 1]),)
    return words


@triton.jit
def each_transposed(words):
    turned = ()
    for i in tl.static_range(len(words)):
        turned = turned + (transposed(words[i]),)
    return turned


@triton.jit
def each_negated(words):
    negated = ()
    for i in tl.static_range(len(words)):
        negated = negated + (words[i] ^ SIGNS,)
    return negated


@triton.jit
def products_of_tokens(k, q, zero, lane, NP: tl.constexpr):
    """Returns k_g . k_2t, k_g . k_2t+1, and in one word q_g . k_2t and q_g . k_2t+1, zero where the key comes later."""
    a = ()
    for j in tl.static_range(NP):
        a = a + (k[j], q[j])
    c = over_states((zero, zero, zero, zero), a, k, NP)
    g, t = lane.g, lane.t
    reads = packed(tl.where(2 * t <= g, c[2], 0.0), tl.where(2 * t < g, c[3], 0.0))
    return c[0], c[1], reads


@triton.jit
def own_products(G0, G1, t):
    """Returns the product of the keys of tokens 2t and 2t + 1, and 1 + ||k||^2 of each."""
    return from_lane(G0, 9 * t + 4), 1.0 + from_lane(G0, 9 * t), 1.0 + from_lane(G1, 9 * t + 4)


@triton.jit
def _bounded(exponent, form):
    return tl.minimum(exponent, MAX_EXPONENT) if form.BACKWARD else exponent


@triton.jit
def step_sizes(words, kept, zero, bias, n0, n1, cp: tl.constexpr, form):
    """Computes eps and e = exp(-logit) of a tile (1), each laid out as C. With RP, `words` are at low rank, and `kept`
    has the projection."""
    if form.SCALAR:
        e0 = exp2(_bounded(low(words[0]) * -LOG2E + bias[0], form))
        e1 = exp2(_bounded(low(words[1]) * -LOG2E + bias[0], form))
        e = (e0, e1, e0, e1)
    else:
        us = ()
        if form.RP > 0:
            us = over_states((zero, zero, zero, zero), kept_projection(kept, cp, form), words, form.RP)
        e = ()
        for i in tl.static_range(4):
            if form.RP > 0:
                u = us[i]
            else:
                word = words[form.CP * (i % 2) + cp]
                u = low(word) if i < 2 else high(word)
            e = e + (exp2(_bounded(u * -LOG2E + bias[2 * cp + i // 2], form)),)
    eps = ()
    for i in tl.static_range(4):
        eps = eps + (reciprocal((n1 if i % 2 else n0) + e[i], True),)
    return eps, e
