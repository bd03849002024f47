/* The steps between an activation and a message, on C numbers: as in steps.py. */

/* An array of parameters or running statistics, or NULL. */
typedef struct {
    void *at;
    int64_t dtype;
} Parameter;

#define EACH_DTYPE(CODE)                                      \
    switch (array.dtype) {                                    \
    case 0: CODE(float, , (float)); break;                    \
    case 1: CODE(double, , ); break;                          \
    case 2: CODE(uint16_t, from_float16, to_float16); break;  \
    default: CODE(uint16_t, from_bfloat16, to_bfloat16);      \
    }

/* Read n numbers of an array in float64, from index `from` on, `step` apart; `put` writes float64 numbers. */
static void get(Parameter array, int64_t from, int64_t step, int64_t n, double *restrict numbers)
{
#define CODE(A, wide, narrow) \
    for (int64_t i = 0; i < n; i++) numbers[i] = wide(((const A *)array.at)[from + i * step])
    EACH_DTYPE(CODE)
#undef CODE
}

static void put(const double *restrict numbers, int64_t n, Parameter array)
{
#define CODE(A, wide, narrow) \
    for (int64_t i = 0; i < n; i++) ((A *)array.at)[i] = narrow(numbers[i])
    EACH_DTYPE(CODE)
#undef CODE
}

enum { WEIGHT, COUNT, NUM_SCALARS }; /* after the 2C numbers of a forward message: see wire.py */
enum { OK, NOT_FINITE = 2, ONE_VALUE, CANCELLED }; /* states of a message: see spec.py */

static const double LARGEST = 0x1p940, LARGEST_SUM = 0x1p960; /* see wire.py */

static void pack(const double *mean, const double *var, double *packed, int64_t C, double weight, double count,
                 double mark)
{
    for (int64_t c = 0; c < C; c++) {
        const double meansqr = weight * (var[c] + mean[c] * mean[c]);
        const int finite = meansqr < LARGEST; /* not a NaN */
        packed[c] = finite ? weight * mean[c] : mark;
        packed[C + c] = finite ? meansqr : mark;
    }
    packed[2 * C + WEIGHT] = weight;
    packed[2 * C + COUNT] = count;
}

/* The per-channel arguments of a pass; `finish_forward` writes the mean and the variance. */
typedef struct {
    double *mean, *var, *count, *element_weight;
    Parameter weight, bias;
    double eps;
} Statistics;

/* Write the statistics in the sum of all messages. Returns the state of the message. */
static int unpack(const double *summed, const Statistics *s, int64_t C, double weight, double count, double least)
{
    double *const mean = s->mean, *const var = s->var, eps = s->eps;
    const double total_weight = summed[2 * C + WEIGHT], divisor = total_weight == 0 ? 1 : total_weight;
    int state = count <= 1 && summed[2 * C + COUNT] == 1 ? ONE_VALUE : OK;
    for (int64_t c = 0; c < C; c++) {
        mean[c] = summed[c] / divisor;
        const double difference = summed[C + c] / divisor - mean[c] * mean[c];
        var[c] = difference < 0 ? 0 : difference; /* NaN stays */
        if (!(fabs(summed[C + c]) < LARGEST_SUM))
            state = NOT_FINITE;
        if (state == OK && mean[c] * mean[c] * least > var[c] + eps)
            state = CANCELLED;
    }
    *s->count = summed[2 * C + COUNT];
    *s->element_weight = weight / ((count > 1 ? count : 1) * divisor);
    return state;
}

static double std_of(const Statistics *s, int64_t c) { return sqrt(s->var[c] + s->eps); }

static void output_coefficients(const Statistics *s, int64_t C, double *scale, double *shift)
{
    for (int64_t c = 0; c < C; c++) {
        scale[c] = 1;
        shift[c] = 0;
    }
    if (s->weight.at)
        get(s->weight, 0, 1, C, scale);
    if (s->bias.at)
        get(s->bias, 0, 1, C, shift);
    for (int64_t c = 0; c < C; c++)
        scale[c] *= 1 / std_of(s, c);
}

/* Write the variance from the sums, and replace the centre by the mean. Returns in how many channels the centre was far
from the mean. */
static int64_t finish_moments(const double *sums, double *mean, double *var, double count, int64_t C)
{
    int64_t far = 0;
    for (int64_t c = 0; c < C; c++) {
        const double first = sums[c] / count, difference = sums[C + c] / count - first * first;
        mean[c] += first;
        var[c] = difference < 0 ? 0 : difference; /* NaN stays */
        far += first * first > DISTANT * DISTANT * var[c];
    }
    return far;
}

enum { UNBIASED_GLOBAL, UNBIASED_LOCAL, BIASED, NUM_CONVENTIONS }; /* of a running variance */
static const char *const CONVENTIONS[] = {"unbiased_global", "unbiased_local", "biased"};

/* See `spec.Running`. */
typedef struct {
    Parameter mean, var; /* NULL if nothing is to be moved */
    double momentum;     /* NaN for 1/n at the n-th batch */
    int64_t convention, *num_batches;
} Running;

/* Move a running statistic towards that of a batch. */
static void approach(Parameter running, const double *batch, int64_t C, double momentum, double factor, double *old)
{
    get(running, 0, 1, C, old);
    for (int64_t c = 0; c < C; c++)
        old[c] = (1 - momentum) * old[c] + momentum * (batch[c] * factor);
    put(old, C, running);
}

static void move(const Running *r, const Statistics *s, int64_t C, double count, double *memory)
{
    const double total = *s->count;
    if (!(total > 0))
        return;
    double momentum = r->momentum, n = r->convention == UNBIASED_LOCAL && count > 0 ? count : total;
    if (r->num_batches)
        ++*r->num_batches;
    if (isnan(momentum))
        momentum = r->num_batches ? 1.0 / (*r->num_batches > 1 ? *r->num_batches : 1) : 0;
    approach(r->mean, s->mean, C, momentum, 1, memory);
    approach(r->var, s->var, C, momentum, r->convention == BIASED ? 1 : n / (n > 2 ? n - 1 : 1), memory);
}
