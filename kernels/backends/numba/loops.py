"""The compiled loops of the scans. docs/scan.md has the equations whose numbers stand in the comments.

A program takes `WIDTH` channels of one sequence, in each direction in turn. Its states are rows of WIDTH channels, one
after the other in a flat array of some kilobytes, so that they stay in the cache. The innermost loops go over channels:
LLVM turns them into vector instructions. Channels beyond D are zeros, and zero keys fill up the number of states to a
multiple of 4: rows are taken four at a time, so that a sum over states is read and written a quarter as often.

All functions are in one file, because Numba's cache looks only at the file of the function that is called.
"""

from functools import cache

import numba
import numpy as np

WIDTH = 64  # channels of a program
CHUNK = 8  # tokens from one saved state to the next
ANCHOR = 64  # tokens after which the error rules, which are undone on the way back, start from a saved state

LONGHORN, SOFTPLUS, PLAIN, NO_STEP = range(4)  # how a logit becomes a step size
ERROR, DIAGONAL, LONE, RATES, TOKEN_RATES = range(5)  # how a token changes the state


def _jit(function, fastmath=frozenset({"contract", "nsz"}), forceinline=True):
    options = dict(nogil=True, error_model="numpy", fastmath=set(fastmath), forceinline=forceinline)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for compiled code can be written
        return numba.njit(**options)(function)


def _sums(function):
    """Compile a function whose sums over channels may be taken in the order of the vector instructions."""
    return _jit(function, {"contract", "nsz", "reassoc"})


def _loop(function):
    return _jit(function, forceinline=False)


@_jit
def _exp(v):
    """Return exp(v) in float32, with a relative error of 1e-7. v is cut off at -87 and 87."""
    v = min(max(v, np.float32(-87.0)), np.float32(87.0))  # NaN stays NaN
    whole = np.floor(v * np.float32(1.44269504) + np.float32(0.5))
    # v - whole log(2), whose first part has zeros at its end
    r = v - whole * np.float32(0.693359375)
    r = r - whole * np.float32(-2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@_jit
def _sigmoid(v):
    return np.float32(1.0) / (np.float32(1.0) + _exp(-v))


@_jit
def _softplus(v):
    """Return log(1 + exp(v)): max(v, 0) + log(1 + u) with u = exp(-|v|), and log(1 + u) = 2 artanh(u / (2 + u))."""
    u = _exp(-abs(v))
    s = u / (np.float32(2.0) + u)  # at most 1 / 3
    t = s * s
    p = np.float32(2 / 15)
    p = p * t + np.float32(2 / 13)
    p = p * t + np.float32(2 / 11)
    p = p * t + np.float32(2 / 9)
    p = p * t + np.float32(2 / 7)
    p = p * t + np.float32(2 / 5)
    p = p * t + np.float32(2 / 3)
    p = p * t + np.float32(2.0)
    return max(v, np.float32(0.0)) + s * p


@_jit
def _load(source, at, width, to):
    """Copy `width` numbers of a row, and fill up with zeros."""
    row = source[at : at + width]
    for d in range(width):
        to[d] = row[d]
    for d in range(width, to.shape[0]):
        to[d] = 0


@_jit
def _store(values, to, at, width, add):
    row = to[at : at + width]
    if add:
        for d in range(width):
            row[d] += values[d]
    else:
        for d in range(width):
            row[d] = values[d]


@_jit
def _load_logits(source, at, width, of_channels, bias, to):
    """Load the logits of a token, one for each channel or one for all, with their bias."""
    if of_channels:
        row = source[at : at + width]
        for d in range(width):
            to[d] = row[d] + bias[d]
        for d in range(width, WIDTH):
            to[d] = 0
    else:
        u = source[at]
        for d in range(WIDTH):
            to[d] = u + bias[d]


@_jit
def _sizes(form, u, norm, eps, e):
    """Compute the step sizes of a token, and exp(-u) where the gradient of the logits takes it."""
    if form == LONGHORN:
        for d in range(WIDTH):
            e[d] = _exp(-u[d])
            eps[d] = np.float32(1.0) / (np.float32(1.0) + e[d] + norm)  # (1)
    elif form == SOFTPLUS:
        for d in range(WIDTH):
            eps[d] = _softplus(u[d])
    elif form == PLAIN:
        for d in range(WIDTH):
            eps[d] = u[d]
    else:
        for d in range(WIDTH):
            eps[d] = 1


@_jit
def _row():
    return np.zeros(WIDTH, np.float32)


@_jit
def _rows(count):
    return np.zeros((count, WIDTH), np.float32)


@_jit
def _norm(k, takes_norm):
    norm = np.float32(0.0)
    if takes_norm:
        for n in range(k.shape[0]):
            norm += k[n] * k[n]
    return norm


@_jit
def _add_read(rows, weights, out, sign):
    """Add the sum over states of weight times row to `out`, or subtract it."""
    for n in range(0, weights.shape[0], 4):
        a, b = sign * weights[n], sign * weights[n + 1]
        c, d = sign * weights[n + 2], sign * weights[n + 3]
        for i in range(WIDTH):
            out[i] += (a * rows[n, i] + b * rows[n + 1, i]) + (c * rows[n + 2, i] + d * rows[n + 3, i])


@_jit
def _add_outer(rows, weights, values):
    """Add weight times value to each row."""
    for n in range(0, weights.shape[0], 4):
        a, b, c, d = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        for i in range(WIDTH):
            rows[n, i] += a * values[i]
            rows[n + 1, i] += b * values[i]
            rows[n + 2, i] += c * values[i]
            rows[n + 3, i] += d * values[i]


@_jit
def _add_outer_and_read(rows, outer, values, weights, out):
    """Add outer times value to each row, then the sum over states of weight times row to `out`."""
    for n in range(0, weights.shape[0], 4):
        a, b, c, d = outer[n], outer[n + 1], outer[n + 2], outer[n + 3]
        e, f, g, h = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        for i in range(WIDTH):
            v = values[i]
            p, q = rows[n, i] + a * v, rows[n + 1, i] + b * v
            r, s = rows[n + 2, i] + c * v, rows[n + 3, i] + d * v
            rows[n, i], rows[n + 1, i], rows[n + 2, i], rows[n + 3, i] = p, q, r, s
            out[i] += (e * p + f * q) + (g * r + h * s)


@_jit
def _decay(form, n, square, rate, eps, e):
    """Compute a decay in row n of the states from the square of its key and its rate."""
    if form == DIAGONAL:
        return np.float32(1.0) - eps * square
    elif form == LONE:  # as in `rules.longhorn.Diagonal.decays`
        a = np.float32(1.0) - eps * square
        return eps * (np.float32(1.0) + e) if n == 0 and a < np.float32(0.5) else a
    else:
        return _exp(eps * rate)


@_jit
def _decay_step(form, before, after, decays, k, rates, eps, e, w):
    """Compute a token's decays and new state."""
    for n in range(k.shape[0]):
        key, square = k[n], k[n] * k[n]
        for i in range(WIDTH):
            a = _decay(form, n, square, rates[n, i if form == RATES else 0], eps[i], e[i])
            decays[n, i] = a
            after[n, i] = a * before[n, i] + key * w[i]


@_jit
def _decay_step_and_read(form, state, k, q, rates, eps, e, w, out):
    """Take a token's step, and add the sum over states of query times new state to `out`."""
    for n in range(0, k.shape[0], 4):
        for i in range(WIDTH):
            total = np.float32(0.0)
            for m in range(4):
                rate = rates[n + m, i if form == RATES else 0]
                a = _decay(form, n + m, k[n + m] * k[n + m], rate, eps[i], e[i])
                new = a * state[n + m, i] + k[n + m] * w[i]
                state[n + m, i] = new
                total += q[n + m] * new
            out[i] += total


@_jit
def _load_rates(form, A, at, width, N, to):
    """Load A of the program's channels, or of a token."""
    if form == RATES:
        for n in range(N):
            for d in range(width):
                to[n, d] = A[at + d * N + n]
    elif form == TOKEN_RATES:
        row = A[at : at + N]
        for n in range(N):
            to[n, 0] = row[n]


@_jit
def _load_state(states, at, width, N, to):
    to[:, :] = 0
    if states.shape[0]:
        for d in range(width):
            for n in range(N):
                to[n, d] = states[at + d * N + n]


@_jit
def _store_state(state, to, at, width, N):
    if to.shape[0]:
        for d in range(width):
            for n in range(N):
                to[at + d * N + n] = state[n, d]


@cache
def forward_of(step_form, form, takes_norm):
    """Return the forward loop of rules with these forms, where `takes_norm` says whether ||k||^2 enters the step."""

    @_loop
    def forward(first, last, sizes, turned, scale, at, x, step, k, q, A, z, skip, bias, initial, y, final, saved):
        """Scan with programs `first` to `last`. For a rule of kind "decay", `saved` gets the state before each chunk.

        Args:
            sizes: (G, B, L, D, N, whether the directions are added in y, whether each channel has a logit).
            turned: for each direction, whether it runs from the last token to the first.
            scale: what y is multiplied by.
            at: (fields, 3) strides of x, step, k, q, A (of a token) and z: of direction, sequence and token.
            Flat arrays; those that are absent are empty: x, step, k, q, A, z by their strides, skip (G, D), bias
            (G, D or 1), A (G, D, N) otherwise, initial and final (G, B, D, N), y ([G,] B, L, D), saved
            (G, chunks, B, N, D).
        """
        G, B, L, D, N, added, of_channels = sizes
        rows, blocks, chunks = (N + 3) // 4 * 4, (D + WIDTH - 1) // WIDTH, (L + CHUNK - 1) // CHUNK
        # (Where arrays are parts of one, LLVM makes no vector instructions.)
        state, rates = _rows(rows), _rows(rows)
        values, logits, eps, e, w, out = _row(), _row(), _row(), _row(), _row(), _row()
        gate, weights, biases, key, query = (
            _row(),
            _row(),
            _row(),
            np.zeros(rows, np.float32),
            np.zeros(rows, np.float32),
        )
        for program in range(first, last):
            b, d0 = program // blocks, program % blocks * WIDTH
            width = min(WIDTH, D - d0)
            for g in range(G):
                _load_state(initial, ((g * B + b) * D + d0) * N, width, N, state)
                if skip.shape[0]:
                    _load(skip, g * D + d0, width, weights)
                if bias.shape[0]:
                    _load_logits(
                        bias, g * D + d0 if of_channels else g, width, of_channels, np.zeros_like(biases), biases
                    )
                if form == RATES:
                    _load_rates(form, A, (g * D + d0) * N, width, N, rates)
                base = at[:, 0] * g + at[:, 1] * b
                for i in range(L):
                    t = L - 1 - i if turned[g] else i
                    if saved.shape[0] and i % CHUNK == 0:
                        for n in range(N):
                            to = (((g * chunks + i // CHUNK) * B + b) * N + n) * D + d0
                            _store(state[n], saved, to, width, False)
                    _load(k, base[2] + at[2, 2] * t, N, key)
                    _load(q, base[3] + at[3, 2] * t, N, query)
                    _load(x, base[0] + at[0, 2] * t + d0, width, values)
                    if step_form != NO_STEP:
                        _load_logits(
                            step,
                            base[1] + at[1, 2] * t + (d0 if of_channels else 0),
                            width,
                            of_channels,
                            biases,
                            logits,
                        )
                    _sizes(step_form, logits, _norm(key, takes_norm), eps, e)
                    for d in range(WIDTH):
                        out[d] = weights[d] * values[d]
                    if form == ERROR:
                        for d in range(WIDTH):
                            w[d] = values[d]
                        _add_read(state, key, w, np.float32(-1.0))
                        for d in range(WIDTH):
                            w[d] *= eps[d]
                        _add_outer_and_read(state, key, w, query, out)
                    else:
                        if form == TOKEN_RATES:
                            _load_rates(form, A, base[4] + at[4, 2] * t, width, N, rates)
                        for d in range(WIDTH):
                            w[d] = values[d] * eps[d]
                        _decay_step_and_read(form, state, key, query, rates, eps, e, w, out)
                    if z.shape[0]:
                        _load(z, base[5] + at[5, 2] * t + d0, width, gate)
                        for d in range(WIDTH):
                            out[d] *= gate[d] * _sigmoid(gate[d])
                    for d in range(WIDTH):
                        out[d] *= scale
                    _store(out, y, (((0 if added else g) * B + b) * L + t) * D + d0, width, added and g > 0)
                _store_state(state, final, ((g * B + b) * D + d0) * N, width, N)

    return forward


@_sums
def _dot(a, b):
    total = np.float32(0.0)
    for i in range(WIDTH):
        total += a[i] * b[i]
    return total


@_sums
def _undo_error_step(state, adjoint, k, w, dx, dout, dk, dq):
    """Step back over a token, from the state after it and its adjoint with the read-out: (9), (10), (16)."""
    for n in range(k.shape[0]):
        of_key, of_query = np.float32(0.0), np.float32(0.0)
        for i in range(WIDTH):
            before = state[n, i] - k[n] * w[i]
            of_query += dout[i] * state[n, i]
            of_key += w[i] * adjoint[n, i] - dx[i] * before
            state[n, i] = before
            adjoint[n, i] -= k[n] * dx[i]
        dk[n], dq[n] = of_key, of_query


@_sums
def _decay_step_back(form, before, after, adjoint, decays, rates, k, values, w, dx, eps, dout, deps, dk, dq, dA, dAs):
    """Step back over a token, from the states around it and the adjoint with its read-out: (9), (10), (12), (13), and
    for rates (18), (19). The gradient of a rate of a token is put into `dA`, that of another added to `dAs`."""
    two = np.float32(2.0)
    for n in range(k.shape[0]):
        of_key, of_query, of_rate, key = np.float32(0.0), np.float32(0.0), np.float32(0.0), k[n]
        if form == DIAGONAL:
            for i in range(WIDTH):
                flow = adjoint[n, i] * before[n, i]
                of_query += dout[i] * after[n, i]
                of_key += w[i] * adjoint[n, i] - two * key * (eps[i] * flow)
                deps[i] -= key * key * flow
                adjoint[n, i] *= decays[n, i]
        elif form == LONE:
            for i in range(WIDTH):
                flow = adjoint[n, i] * before[n, i]
                of_query += dout[i] * after[n, i]
                of_key += w[i] * adjoint[n, i] - two * key * (
                    eps[i] * (flow * decays[n, i] + dx[i] * values[i])
                )  # (20)
                deps[i] -= key * key * flow
                adjoint[n, i] *= decays[n, i]
        elif form == RATES:
            for i in range(WIDTH):
                flow = adjoint[n, i] * decays[n, i] * before[n, i]
                of_query += dout[i] * after[n, i]
                of_key += w[i] * adjoint[n, i]
                deps[i] += rates[n, i] * flow
                dAs[n, i] += eps[i] * flow
                adjoint[n, i] *= decays[n, i]
        else:
            for i in range(WIDTH):
                flow = adjoint[n, i] * decays[n, i] * before[n, i]
                of_query += dout[i] * after[n, i]
                of_key += w[i] * adjoint[n, i]
                deps[i] += rates[n, 0] * flow
                of_rate += eps[i] * flow
                adjoint[n, i] *= decays[n, i]
        dk[n], dq[n], dA[n] = of_key, of_query, of_rate


@cache
def backward_of(step_form, form, takes_norm):
    """Return the backward loop, see `forward_of`."""

    @_loop
    def backward(
        first,
        last,
        sizes,
        turned,
        scale,
        at,
        x,
        step,
        k,
        q,
        A,
        z,
        skip,
        bias,
        initial,
        dy,
        dfinal,
        saved,
        out_at,
        dx,
        dstep,
        dz,
        sums,
        dA,
        dskip,
        dbias,
        dinitial,
    ):
        """Walk back with programs `first` to `last`.

        Args:
            dy: by its strides, the last of `at`; empty for zeros. dfinal: (G, B, D, N) or empty. saved: as in
                `forward`; empty if the states are to be found again, as they always are for rules of kind "error".
            out_at: strides of dx, dstep and dz, flat arrays; a direction whose stride is zero adds to the first one's.
            sums: (blocks, G, B, L, 3 N + 1), a program's part of the gradients of k, q, A (of a token) and one logit.
            dA: (G, B, N, D). dskip, dbias: (G, B, D). dinitial: (G, B, D, N).
        """
        G, B, L, D, N, added, of_channels = sizes
        rows, blocks, chunks = (N + 3) // 4 * 4, (D + WIDTH - 1) // WIDTH, (L + CHUNK - 1) // CHUNK
        state, adjoint, rates, dAs = _rows(rows), _rows(rows), _rows(rows), _rows(rows)
        values, logits, out, gate, weights, biases = _row(), _row(), _row(), _row(), _row(), _row()
        reads, dwrite, deps, dweights, dbiases = _row(), _row(), _row(), _row(), _row()
        key, query, drate = np.zeros(rows, np.float32), np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        dkey, dquery = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        # The tokens that are walked through before the way back: all of an error rule, a chunk of the others.
        span = L if form == ERROR else CHUNK
        writes, eps, e = _rows(span), _rows(span), _rows(span)
        kept = (L + ANCHOR - 1) // ANCHOR if form == ERROR else (0 if saved.shape[0] else chunks)
        starts = np.empty((kept, rows, WIDTH), np.float32)
        states = np.zeros((CHUNK + 1 if form != ERROR else 0, rows, WIDTH), np.float32)
        decays = np.zeros((CHUNK if form != ERROR else 1, rows, WIDTH), np.float32)
        for program in range(first, last):
            b, block = program // blocks, program % blocks
            d0 = block * WIDTH
            width = min(WIDTH, D - d0)
            for g in range(G):
                base, out_base = at[:, 0] * g + at[:, 1] * b, out_at[:, 0] * g + out_at[:, 1] * b
                _load_state(initial, ((g * B + b) * D + d0) * N, width, N, state)
                _load_state(dfinal, ((g * B + b) * D + d0) * N, width, N, adjoint)
                if skip.shape[0]:
                    _load(skip, g * D + d0, width, weights)
                if bias.shape[0]:
                    _load_logits(
                        bias, g * D + d0 if of_channels else g, width, of_channels, np.zeros_like(biases), biases
                    )
                if form == RATES:
                    _load_rates(form, A, (g * D + d0) * N, width, N, rates)
                dAs[:], dweights[:], dbiases[:] = 0, 0, 0
                # First the walk that finds states again. Then the chunks, the last one first: a walk through its
                # tokens, which error rules need not, and the way back.
                found = form != ERROR and saved.shape[0] > 0
                for piece in range(1 if found else 0, chunks + 1):
                    chunk = chunks - piece
                    start, end = (0, L) if piece == 0 else (chunk * CHUNK, min(L, (chunk + 1) * CHUNK))
                    if piece and form != ERROR:
                        if found:
                            for n in range(N):
                                place = (((g * chunks + chunk) * B + b) * N + n) * D + d0
                                _load(saved, place, width, states[0, n])
                        else:
                            states[0] = starts[chunk]
                    if piece == 0 or form != ERROR:
                        for i in range(start, end):
                            t = L - 1 - i if turned[g] else i
                            j = i % span
                            if piece == 0 and form != ERROR and i % CHUNK == 0:
                                starts[i // CHUNK] = state
                            _load(k, base[2] + at[2, 2] * t, N, key)
                            _load(x, base[0] + at[0, 2] * t + d0, width, values)
                            if step_form != NO_STEP:
                                place = base[1] + at[1, 2] * t + (d0 if of_channels else 0)
                                _load_logits(step, place, width, of_channels, biases, logits)
                            _sizes(step_form, logits, _norm(key, takes_norm), eps[j], e[j])
                            w = writes[j]
                            if form == ERROR:
                                for d in range(WIDTH):
                                    w[d] = values[d]
                                _add_read(state, key, w, np.float32(-1.0))
                                for d in range(WIDTH):
                                    w[d] *= eps[j, d]
                                _add_outer(state, key, w)
                                if i % ANCHOR == ANCHOR - 1:
                                    starts[i // ANCHOR] = state
                            else:
                                if form == TOKEN_RATES:
                                    _load_rates(form, A, base[4] + at[4, 2] * t, width, N, rates)
                                for d in range(WIDTH):
                                    w[d] = values[d] * eps[j, d]
                                if piece:
                                    _decay_step(form, states[j], states[j + 1], decays[j], key, rates, eps[j], e[j], w)
                                else:
                                    # As the forward pass does, to the bit; what is read is not used.
                                    _decay_step_and_read(form, state, key, query, rates, eps[j], e[j], w, reads)
                    if piece == 0:
                        continue
                    for i in range(end - 1, start - 1, -1):
                        t = L - 1 - i if turned[g] else i
                        j = i % span
                        if form == ERROR and i % ANCHOR == ANCHOR - 1:
                            state[:] = starts[i // ANCHOR]
                        now = state if form == ERROR else states[j + 1]
                        _load(k, base[2] + at[2, 2] * t, N, key)
                        _load(q, base[3] + at[3, 2] * t, N, query)
                        _load(x, base[0] + at[0, 2] * t + d0, width, values)
                        if dy.shape[0]:
                            _load(dy, base[6] + at[6, 2] * t + d0, width, out)
                            for d in range(WIDTH):
                                out[d] *= scale
                        else:
                            out[:] = 0
                        if z.shape[0]:
                            _load(z, base[5] + at[5, 2] * t + d0, width, gate)
                            for d in range(WIDTH):
                                reads[d] = weights[d] * values[d]
                            _add_read(now, query, reads, np.float32(1.0))
                            for d in range(WIDTH):  # (8)
                                s = _sigmoid(gate[d])
                                reads[d] *= out[d] * (s * (np.float32(1.0) + gate[d] * (np.float32(1.0) - s)))
                                out[d] *= gate[d] * s
                            _store(reads, dz, out_base[2] + out_at[2, 2] * t + d0, width, g > 0 and out_at[2, 0] == 0)
                        for d in range(WIDTH):
                            dweights[d] += out[d] * values[d]
                            reads[d] = 0
                        _add_outer_and_read(adjoint, query, out, key, reads)
                        for d in range(WIDTH):
                            dwrite[d] = eps[j, d] * reads[d]  # (11)
                        if form == ERROR:
                            _undo_error_step(state, adjoint, key, writes[j], dwrite, out, dkey, dquery)
                            for d in range(WIDTH):
                                deps[d] = writes[j, d] * reads[d]  # (15), times eps
                        else:
                            if form == TOKEN_RATES:
                                _load_rates(form, A, base[4] + at[4, 2] * t, width, N, rates)
                            for d in range(WIDTH):
                                deps[d] = values[d] * reads[d]
                            _decay_step_back(
                                form, states[j], now, adjoint, decays[j], rates, key, values, writes[j], dwrite, eps[j],
                                out, deps, dkey, dquery, drate, dAs)  # fmt: skip
                            if step_form == LONGHORN:
                                for d in range(WIDTH):
                                    deps[d] *= eps[j, d]
                        for d in range(WIDTH):
                            dwrite[d] += weights[d] * out[d]
                        _store(dwrite, dx, out_base[0] + out_at[0, 2] * t + d0, width, g > 0 and out_at[0, 0] == 0)
                        if takes_norm and form != LONE:  # the last term of (13) and (16)
                            through = np.float32(2.0) * _dot(deps, eps[j])
                            for n in range(rows):
                                dkey[n] -= through * key[n]
                        if step_form == LONGHORN:
                            for d in range(WIDTH):
                                deps[d] *= eps[j, d] * e[j, d]  # (17)
                        elif step_form == SOFTPLUS:
                            _load_logits(
                                step,
                                base[1] + at[1, 2] * t + (d0 if of_channels else 0),
                                width,
                                of_channels,
                                biases,
                                logits,
                            )
                            for d in range(WIDTH):
                                deps[d] *= _sigmoid(logits[d])
                        place = (((block * G + g) * B + b) * L + t) * (3 * N + 1)
                        if step_form != NO_STEP:
                            for d in range(width, WIDTH):
                                deps[d] = 0
                            for d in range(WIDTH):
                                dbiases[d] += deps[d]
                            if of_channels:
                                _store(
                                    deps, dstep, out_base[1] + out_at[1, 2] * t + d0, width, g > 0 and out_at[1, 0] == 0
                                )
                            else:
                                sums[place + 3 * N] = _dot(deps, np.ones_like(deps))
                        _store(dkey, sums, place, N, False)
                        _store(dquery, sums, place + N, N, False)
                        if form == TOKEN_RATES:
                            _store(drate, sums, place + 2 * N, N, False)
                _store(dweights, dskip, (g * B + b) * D + d0, width, False)
                _store(dbiases, dbias, (g * B + b) * D + d0, width, False)
                for n in range(N if form == RATES else 0):
                    _store(dAs[n], dA, ((g * B + b) * N + n) * D + d0, width, False)
                _store_state(adjoint, dinitial, ((g * B + b) * D + d0) * N, width, N)

    return backward
