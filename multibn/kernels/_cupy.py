"""The CUDA source of `cupy`.

Macros of the compilation are X, G, P and R, the dtypes of the activation, of the gradient of its
output, of weight and bias, and of the running statistics; INDEX, which counts elements; and
THREADS, of a block of the reductions, a power of two.

An activation has sizes (N, C, S) in memory, see `layout`. Arithmetic is in float64. It is compiled
without fused operations, so that products and sums are rounded one by one, as in `generic`:
otherwise a constant would have a variance over the ranks.
"""

SOURCE = r"""
#ifdef __CUDACC__
struct half { unsigned short bits; };
__device__ inline double wide(half v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
    return f;
}
__device__ inline void put(half *p, double v) {
    asm("cvt.rn.f16.f64 %0, %1;" : "=h"(p->bits) : "d"(v));
}
#endif
__device__ inline double wide(float v) { return v; }
__device__ inline double wide(double v) { return v; }
__device__ inline void put(float *p, double v) { *p = (float)v; }
__device__ inline void put(double *p, double v) { *p = v; }

// As the output is stored: its sign tells where ReLU was.
__device__ inline double rounded(double v) {
    X stored;
    put(&stored, v);
    return wide(stored);
}

// Sums a and b over the rows of a block; thread t has row t / cols. The result is in row 0.
__device__ inline void add_rows(double *a, double *b, double a_own, double b_own, unsigned cols) {
    const unsigned t = threadIdx.x;
    a[t] = a_own;
    b[t] = b_own;
    for (unsigned n = THREADS / 2; n >= cols; n /= 2) {
        __syncthreads();
        if (t < n) {
            a[t] += a[t + n];
            b[t] += b[t + n];
        }
    }
    __syncthreads();
}

// The elements of channel c in one split, for one thread: every `step`-th.
struct Walk {
    INDEX j, end, n, s, step, step_n, step_s, C, S, c;
    __device__ Walk(INDEX first, INDEX end, INDEX step, INDEX C, INDEX S, INDEX c)
        : j(first), end(end), n(first / S), s(first % S), step(step), step_n(step / S),
          step_s(step % S), C(C), S(S), c(c) {}
    __device__ bool more() const { return j < end; }
    __device__ INDEX place() const { return (n * C + c) * S + s; }
    __device__ void go() {
        j += step;
        n += step_n;
        s += step_s;
        if (s >= S) {
            s -= S;
            ++n;
        }
    }
};

__device__ inline Walk walk(INDEX N, INDEX C, INDEX S, INDEX length, unsigned cols, INDEX c) {
    const INDEX first = blockIdx.y * length, left = N * S - first;
    const INDEX rows = THREADS / cols;
    return Walk(first + threadIdx.x / cols, first + (left < length ? left : length), rows, C, S, c);
}

// Writes a block's sums, those of `cols` channels in one split.
__device__ inline void write_sums(
    double *partials, double *a, double *b, double a_own, double b_own, INDEX C, INDEX c,
    unsigned cols
) {
    add_rows(a, b, a_own, b_own, cols);
    if (c < C && threadIdx.x < cols) {
        partials[blockIdx.y * C + c] = a[threadIdx.x];
        partials[((INDEX)gridDim.y + blockIdx.y) * C + c] = b[threadIdx.x];
    }
}

// Sums of x - x0 and (x - x0)**2 in each split, where x0 is the first element of the channel.
extern "C" __global__ void moments(
    const X *x, double *partials, INDEX N, INDEX C, INDEX S, INDEX length, unsigned cols
) {
    __shared__ double a[THREADS], b[THREADS];
    const INDEX c = (INDEX)blockIdx.x * cols + threadIdx.x % cols;
    double first = 0, second = 0;
    if (c < C) {
        const double centre = wide(x[c * S]);
        for (Walk w = walk(N, C, S, length, cols, c); w.more(); w.go()) {
            const double d = wide(x[w.place()]) - centre;
            first += d;
            second += d * d;
        }
    }
    write_sums(partials, a, b, first, second, C, c, cols);
}

// Sums of dy and dy * (x - mean) in each split; dy counts as 0 where a ReLU's output was not > 0.
extern "C" __global__ void backward_sums(
    const G *dy, const X *x, const X *y, const double *mean, const double *scale,
    const double *shift, double *partials, INDEX N, INDEX C, INDEX S, INDEX length, unsigned cols,
    int relu
) {
    __shared__ double a[THREADS], b[THREADS];
    const INDEX c = (INDEX)blockIdx.x * cols + threadIdx.x % cols;
    double sum_dy = 0, sum_dy_xmu = 0;
    if (c < C) {
        const double centre = mean[c];
        const double slope = relu && !y ? scale[c] : 0, intercept = relu && !y ? shift[c] : 0;
        for (Walk w = walk(N, C, S, length, cols, c); w.more(); w.go()) {
            const INDEX i = w.place();
            const double d = wide(x[i]) - centre;
            double g = wide(dy[i]);
            if (relu && !((y ? wide(y[i]) : rounded(d * slope + intercept)) > 0)) g = 0;
            sum_dy += g;
            sum_dy_xmu += g * d;
        }
    }
    write_sums(partials, a, b, sum_dy, sum_dy_xmu, C, c, cols);
}

// Sums of the partial sums of a block's 32 channels, in `a` and `b`.
__device__ inline void add_splits(
    const double *partials, double *a, double *b, int splits, INDEX C, INDEX c
) {
    double first = 0, second = 0;
    if (c < C) {
        for (int n = threadIdx.x / 32; n < splits; n += THREADS / 32) {
            first += partials[n * C + c];
            second += partials[(n + (INDEX)splits) * C + c];
        }
    }
    add_rows(a, b, first, second, 32);
}

extern "C" __global__ void pack(
    const double *partials, const X *x, double *packed, double weight, double count, double n,
    INDEX C, INDEX S, int splits
) {
    __shared__ double a[THREADS], b[THREADS];
    const INDEX c = (INDEX)blockIdx.x * 32 + threadIdx.x % 32;
    add_splits(partials, a, b, splits, C, c);
    if (c >= C || threadIdx.x >= 32) return;
    const double d = a[threadIdx.x] / n, mean = wide(x[c * S]) + d;
    double var = b[threadIdx.x] / n - d * d;
    if (var < 0) var = 0;  // NaN stays
    packed[c] = weight * mean;
    packed[C + c] = weight * (var + mean * mean);
    if (c == 0) {
        packed[2 * C] = weight;
        packed[2 * C + 1] = count;
    }
}

extern "C" __global__ void pack_sums(
    const double *partials, const double *var, double eps, double *packed, P *dweight, P *dbias,
    INDEX C, int splits
) {
    __shared__ double a[THREADS], b[THREADS];
    const INDEX c = (INDEX)blockIdx.x * 32 + threadIdx.x % 32;
    add_splits(partials, a, b, splits, C, c);
    if (c >= C || threadIdx.x >= 32) return;
    const double sum_dy = a[threadIdx.x], sum_dy_xhat = b[threadIdx.x] / sqrt(var[c] + eps);
    packed[c] = sum_dy;
    packed[C + c] = sum_dy_xhat;
    if (dweight) put(dweight + c, sum_dy_xhat);
    if (dbias) put(dbias + c, sum_dy);
}

__device__ inline void affine(
    INDEX c, double var, const P *weight, const P *bias, double eps, double *scale, double *shift
) {
    const double invstd = 1.0 / sqrt(var + eps);
    scale[c] = weight ? invstd * wide(weight[c]) : invstd;
    shift[c] = bias ? wide(bias[c]) : 0;
}

__device__ inline void move(R *running, double batch, double momentum) {
    put(running, (1 - momentum) * wide(*running) + momentum * batch);
}

// The sum of all ranks' messages: statistics, coefficients, and running statistics in place.
// `factor` is what the biased variance is multiplied by; 0 for n / (n - 1) over all ranks.
extern "C" __global__ void unpack(
    const double *summed, const P *weight, const P *bias, R *running_mean, R *running_var,
    long long *num_batches, double *mean, double *var, double *count, double *element_weight,
    double *scale, double *shift, double rank_weight, double own_count, double eps,
    double momentum, double factor, INDEX C
) {
    const INDEX c = (INDEX)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    const double total_weight = summed[2 * C], total = summed[2 * C + 1];
    const double divisor = total_weight == 0 ? 1 : total_weight;
    const double m = summed[c] / divisor;
    double v = summed[C + c] / divisor - m * m;
    if (v < 0) v = 0;
    mean[c] = m;
    var[c] = v;
    affine(c, v, weight, bias, eps, scale, shift);
    if (running_mean) {
        const double moved = total > 0 ? momentum : 0;
        const double others = total - 1;
        if (factor == 0) factor = total / (others < 1 ? 1 : others);
        move(running_mean + c, m, moved);
        move(running_var + c, v * factor, moved);
    }
    if (c == 0) {
        *count = total;
        *element_weight = rank_weight / (own_count * divisor);
        if (num_batches && total > 0) ++*num_batches;
    }
}

// Coefficients of the forward pass and, with sums, of the input's gradient, which is
// dy * scale + (x - mean) * slope + intercept.
extern "C" __global__ void coefficients(
    const double *var, const P *weight, const P *bias, double eps, const double *summed,
    const double *element_weight, double factor, double *scale, double *shift, double *slope,
    double *intercept, INDEX C
) {
    const INDEX c = (INDEX)blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    affine(c, var[c], weight, bias, eps, scale, shift);
    if (!summed) return;
    const double pull = -scale[c] * (element_weight ? *element_weight : factor);
    slope[c] = pull * (1.0 / sqrt(var[c] + eps)) * summed[C + c];
    intercept[c] = pull * summed[c];
}

// A thread has 4 elements in a row, so that it divides once.
#define FOR_EACH_OF_FOUR(i, c)                                                              \
    const INDEX begin = ((INDEX)blockIdx.x * blockDim.x + threadIdx.x) * 4;                 \
    INDEX c = begin / S % C, s = begin % S;                                                 \
    for (INDEX i = begin; i < begin + 4 && i < size;                                        \
         ++i, ++s == S ? (s = 0, c = c + 1 == C ? 0 : c + 1) : s)

extern "C" __global__ void normalize(
    const X *x, const X *residual, const double *mean, const double *scale, const double *shift,
    X *y, INDEX size, INDEX C, INDEX S, int relu
) {
    FOR_EACH_OF_FOUR(i, c) {
        double v = (wide(x[i]) - mean[c]) * scale[c] + shift[c];
        if (residual) v += wide(residual[i]);
        if (relu && v <= 0) v = 0;  // NaN stays
        put(y + i, v);
    }
}

extern "C" __global__ void input_gradient(
    const G *dy, const X *x, const X *y, const double *mean, const double *scale,
    const double *shift, const double *slope, const double *intercept, X *dx, G *dresidual,
    INDEX size, INDEX C, INDEX S, int relu
) {
    FOR_EACH_OF_FOUR(i, c) {
        const double d = wide(x[i]) - mean[c];
        double g = wide(dy[i]);
        if (relu && !((y ? wide(y[i]) : rounded(d * scale[c] + shift[c])) > 0)) g = 0;
        put(dx + i, d * slope[c] + g * scale[c] + intercept[c]);
        if (dresidual) put(dresidual + i, g);
    }
}
"""
