/* The compiled part of the host kernels: loops over activations, and the steps between them.

Arrays come as addresses of dense memory; Python looks after their types, shapes and life. Nothing
here knows of NumPy or torch. `generic.py` says what each function computes; `_passes.h` has the
passes and `_loops.h` their innermost loops. The core needs GCC or Clang (vector types) and uses
CPython's stable ABI: one build serves all versions of Python from 3.10 on.

The build has -ffp-contract=off: each operation is rounded, so that equal moments leave a variance
of exactly 0, and the backward pass finds the sign of an output that the forward pass has found. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "_levels.h"

#include "_passes.h"

/* The steps. */

enum { WEIGHT, COUNT, NUM_SCALARS }; /* after the 2C numbers of a forward message: see message.py */
enum { RIGHT, REFUSED, NOT_FINITE, ONE_VALUE }; /* states of a message: see generic.py */

static void pack(const double *mean, const double *var, double *packed, int64_t C, double weight, double count)
{
    for (int64_t c = 0; c < C; c++) {
        packed[c] = weight * mean[c];
        packed[C + c] = weight * (var[c] + mean[c] * mean[c]);
    }
    packed[2 * C + WEIGHT] = weight;
    packed[2 * C + COUNT] = count;
}

static int unpack(const double *summed, double *mean, double *var, double *total_count,
                  double *element_weight, int64_t C, double weight, double count)
{
    const double total_weight = summed[2 * C + WEIGHT], divisor = total_weight == 0 ? 1 : total_weight;
    int state = count <= 1 && summed[2 * C + COUNT] == 1 ? ONE_VALUE : RIGHT;
    for (int64_t c = 0; c < C; c++) {
        mean[c] = summed[c] / divisor;
        const double difference = summed[C + c] / divisor - mean[c] * mean[c];
        var[c] = difference < 0 ? 0 : difference; /* NaN stays */
        if (!isfinite(summed[C + c]))
            state = NOT_FINITE;
    }
    *total_count = summed[2 * C + COUNT];
    *element_weight = weight / ((count > 1 ? count : 1) * divisor);
    return isnan(*total_count) ? REFUSED : state;
}

typedef struct {
    const void *weight, *bias; /* NULL for ones and zeros */
    int64_t dtype;
} Affine;

static void output_coefficients(const double *var, const Affine *a, double eps, int64_t C, double *scale,
                                double *shift)
{
    for (int64_t c = 0; c < C; c++) {
        const double invstd = 1 / sqrt(var[c] + eps);
        scale[c] = a->weight ? invstd * get(a->weight, a->dtype, c) : invstd;
        shift[c] = a->bias ? get(a->bias, a->dtype, c) : 0;
    }
}

/* Write the variance from the sums of all parts, and the mean in place of the centre. Returns how
many channels had a centre that was far from the mean. */
static int64_t finish_moments(const double *sums, double *mean, double *var, double count, int64_t C,
                              int64_t parts)
{
    int64_t far = 0;
    for (int64_t c = 0; c < C; c++) {
        double first = 0, second = 0;
        for (int64_t p = 0; p < parts; p++) {
            first += sums[2 * p * C + c];
            second += sums[(2 * p + 1) * C + c];
        }
        first /= count;
        const double difference = second / count - first * first;
        mean[c] += first;
        var[c] = difference < 0 ? 0 : difference; /* NaN stays */
        far += first * first > FAR * FAR * var[c];
    }
    return far;
}

/* Sums of every `step`th of the `parts` of the samples, from `first` on, of the channels c0:c1. */
static int sum_parts(Pass *p, int64_t N, int64_t parts, int64_t first, int64_t step)
{
    double *const sums = p->sums;
    for (int64_t i = first; i < parts; i += step) {
        p->n0 = N * i / parts;
        p->n1 = N * (i + 1) / parts;
        p->sums = sums + 2 * i * p->C;
        for (int64_t c = p->c0; c < p->c1; c++)
            p->sums[c] = p->sums[p->C + c] = 0;
        if (add_sums(p))
            return -1;
        if (p->kind != MOMENTS) /* about the mean itself, not about the rounded mean */
            for (int64_t c = p->c0; c < p->c1; c++)
                p->sums[p->C + c] -= (p->mean[c] - rounded(p->loops, p->mean[c])) * p->sums[c];
    }
    p->sums = sums;
    return 0;
}

/* Python's side. All arguments of a function are 64 bits wide: numbers and addresses. */

static int parse(PyObject *const *args, Py_ssize_t n, const char *kinds, void *fields)
{
    if (n != (Py_ssize_t)strlen(kinds)) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", (Py_ssize_t)strlen(kinds), n);
        return -1;
    }
    char *field = fields;
    for (Py_ssize_t i = 0; i < n; i++, field += 8) {
        if (kinds[i] == 'd') {
            const double v = PyFloat_AsDouble(args[i]);
            memcpy(field, &v, 8);
        } else {
            const int64_t v = PyLong_AsLongLong(args[i]);
            memcpy(field, &v, 8);
        }
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* A function for Python, whose arguments are the fields of a struct; the first is the dtype. Returns a number, or
MemoryError for one below 0. */
#define FUNCTION(name, Arguments, kinds)                                                          \
    static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t num)             \
    {                                                                                             \
        Arguments a;                                                                              \
        int64_t number;                                                                           \
        (void)self;                                                                               \
        if (parse(args, num, kinds, &a))                                                          \
            return NULL;                                                                          \
        Py_BEGIN_ALLOW_THREADS                                                                    \
        number = name(LEVELS[level].loops + (*(const int64_t *)&a & 3), &a);                      \
        Py_END_ALLOW_THREADS                                                                      \
        return number < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(number);                       \
    }

/* Moments of x about a centre: `mean` if `again`, else the mean of the first values. `sums` are
those of `sums`, or NULL: then they are made here, a second time if the centre was far. */
typedef struct {
    int64_t dtype;
    const void *x;
    const uint8_t *mask;
    int64_t N, C, S, parts;
    double *sums, *mean, *var;
    int64_t again;
    double *packed, weight, count;
} BeginForward;

/* What moments are taken about, rounded: the mean, or at first the mean of each channel's first values, which is
exact if these are equal. */
static void centre(const Pass *p, int64_t dtype, int64_t N, int64_t again, double *mean)
{
    int64_t at[FEW] = {0}, n = 0;
    for (int64_t i = 0; i < N * p->S && n < FEW && !again; i++)
        if (!p->mask || p->mask[i])
            at[n++] = i / p->S * p->C * p->S + i % p->S;
    for (int64_t c = p->c0; c < p->c1; c++) {
        if (!again) {
            const double first = n ? get(p->x, dtype, at[0] + c * p->S) : 0;
            double rest = 0;
            for (int64_t i = 1; i < n; i++)
                rest += get(p->x, dtype, at[i] + c * p->S) - first;
            mean[c] = n ? first + rest / n : 0;
        }
        mean[c] = rounded(p->loops, mean[c]);
    }
}

static int64_t begin_forward(const Loops *loops, const BeginForward *a)
{
    const int64_t C = a->C;
    double *memory = malloc((a->sums ? 2 : 2 + 2 * a->parts) * C * sizeof(double));
    if (!memory)
        return -1;
    double *mean = a->mean ? a->mean : memory, *var = a->var ? a->var : memory + C;
    double *sums = a->sums ? a->sums : memory + 2 * C;
    const double count = !a->mask ? a->N * a->S : a->count > 1 ? a->count : 1;
    Pass p = {.loops = loops, .x = a->x, .mask = a->mask, .mean = mean, .sums = sums, .C = C, .S = a->S, .c1 = C,
              .kind = MOMENTS};
    int64_t far = 0;
    for (int64_t again = a->again; again < 2; again++) {
        centre(&p, a->dtype, a->N, again, mean);
        if (!a->sums && sum_parts(&p, a->N, a->parts, 0, 1)) {
            free(memory);
            return -1;
        }
        far = finish_moments(sums, mean, var, count, C, a->parts);
        if (!far || a->sums)
            break;
    }
    if (a->packed)
        pack(mean, var, a->packed, C, a->weight, a->count);
    free(memory);
    return a->sums ? far : 0;
}

FUNCTION(begin_forward, BeginForward, "iiiiiiiiiiiidd")

/* What a pass reads beside the activations. */
typedef struct {
    const double *mean, *var;
    Affine affine;
    double eps;
} Statistics;

/* One thread's part of `begin_forward` or `begin_backward`. */
typedef struct {
    int64_t dtype, kind;
    const void *x, *dy, *y;
    const uint8_t *mask;
    Statistics s;
    int64_t N, C, S;
    double *sums;
    int64_t parts, first, step, c0, c1;
} Sums;

static int sums(const Loops *loops, const Sums *a)
{
    Pass p = {.loops = loops, .x = a->x, .dy = a->dy, .y = a->y, .mask = a->mask, .mean = a->s.mean,
              .sums = a->sums, .C = a->C, .S = a->S, .c0 = a->c0, .c1 = a->c1, .kind = (int)a->kind};
    double *memory = malloc(2 * a->C * sizeof(double));
    if (!memory)
        return -1;
    if (a->kind == MOMENTS) {
        if (a->s.mean)
            memcpy(memory, a->s.mean, a->C * sizeof(double));
        centre(&p, a->dtype, a->N, a->s.mean != NULL, memory);
        p.mean = memory;
    } else if (a->kind == SIGN_OF_X) {
        p.scale = memory;
        p.shift = memory + a->C;
        output_coefficients(a->s.var, &a->s.affine, a->s.eps, a->C, memory, memory + a->C);
    }
    const int failed = sum_parts(&p, a->N, a->parts, a->first, a->step);
    free(memory);
    return failed;
}

FUNCTION(sums, Sums, "iiiiiiiiiiidiiiiiiiii")

/* Sums of dy and of dy * xhat, into the message and the gradients of weight and bias. `sums` are those of `sums`,
or NULL: then they are made here. */
typedef struct {
    Sums s;
    double *packed;
    void *dweight, *dbias; /* NULL where a parameter is */
} BeginBackward;

static int begin_backward(const Loops *loops, BeginBackward *a)
{
    const int64_t C = a->s.C, parts = a->s.parts, dtype = a->s.s.affine.dtype;
    double *memory = NULL;
    if (!a->s.sums) {
        memory = malloc(2 * C * parts * sizeof(double));
        a->s.sums = memory;
        if (!memory || sums(loops, &a->s)) {
            free(memory);
            return -1;
        }
    }
    for (int64_t c = 0; c < C; c++) {
        double first = 0, second = 0;
        for (int64_t p = 0; p < parts; p++) {
            first += a->s.sums[2 * p * C + c];
            second += a->s.sums[(2 * p + 1) * C + c];
        }
        second /= sqrt(a->s.s.var[c] + a->s.s.eps);
        a->packed[c] = first;
        a->packed[C + c] = second;
        if (a->dweight)
            put(a->dweight, dtype, c, second);
        if (a->dbias)
            put(a->dbias, dtype, c, first);
    }
    free(memory);
    return 0;
}

FUNCTION(begin_backward, BeginBackward, "iiiiiiiiiiidiiiiiiiiiiii")

/* A thread's part of y. */
typedef struct {
    int64_t dtype, relu;
    const void *x, *residual;
    const uint8_t *mask;
    Statistics s;
    void *y;
    int64_t C, S, n0, n1, c0, c1;
} Normalize;

static int normalize(const Loops *loops, const Normalize *a)
{
    double *memory = malloc(2 * a->C * sizeof(double));
    if (!memory)
        return -1;
    Pass p = {.loops = loops, .x = a->x, .y = a->residual, .mask = a->mask, .out = a->y, .mean = a->s.mean,
              .scale = memory, .shift = memory + a->C, .C = a->C, .S = a->S, .n0 = a->n0, .n1 = a->n1, .c0 = a->c0,
              .c1 = a->c1, .kind = a->relu ? SIGN_OF_X : GRADIENT};
    output_coefficients(a->s.var, &a->s.affine, a->s.eps, a->C, memory, memory + a->C);
    const int failed = elementwise(&p, loops->normalize, 3);
    free(memory);
    return failed;
}

FUNCTION(normalize, Normalize, "iiiiiiiiiidiiiiiii")

enum { UNBIASED_GLOBAL, UNBIASED_LOCAL }; /* else biased */

typedef struct {
    void *mean, *var; /* NULL if nothing is to be moved */
    int64_t dtype;
    double momentum; /* negative for 1/n at the n-th batch */
    int64_t convention, *num_batches; /* NULL if nothing is to be counted */
} Running;

static void move(const Running *r, const double *mean, const double *var, int64_t C, double total, double count)
{
    if (!(total > 0))
        return;
    double momentum = r->momentum, factor = 1;
    if (r->num_batches) {
        ++*r->num_batches;
        if (momentum < 0)
            momentum = 1.0 / (*r->num_batches > 1 ? *r->num_batches : 1);
    }
    if (r->convention == UNBIASED_GLOBAL)
        factor = total / (total > 2 ? total - 1 : 1);
    if (r->convention == UNBIASED_LOCAL)
        factor = count / (count > 2 ? count - 1 : 1);
    for (int64_t c = 0; c < C; c++) {
        const double old_mean = get(r->mean, r->dtype, c), old_var = get(r->var, r->dtype, c);
        put(r->mean, r->dtype, c, (1 - momentum) * old_mean + momentum * mean[c]);
        put(r->var, r->dtype, c, (1 - momentum) * old_var + momentum * (var[c] * factor));
    }
}

/* Writes the statistics of the message, moves the running statistics, and then a part of y: none where threads
are to follow. Returns the state of the message. */
typedef struct {
    Normalize n; /* mean and var are written */
    const double *summed;
    double weight, count, *total, *element_weight;
    Running running;
} FinishForward;

static int finish_forward(const Loops *loops, const FinishForward *a)
{
    double *mean = (double *)a->n.s.mean, *var = (double *)a->n.s.var;
    const int state = unpack(a->summed, mean, var, a->total, a->element_weight, a->n.C, a->weight, a->count);
    if (state != RIGHT)
        return state;
    if (a->running.mean)
        move(&a->running, mean, var, a->n.C, *a->total, a->count);
    return a->n.n0 < a->n.n1 ? normalize(loops, &a->n) : RIGHT;
}

FUNCTION(finish_forward, FinishForward, "iiiiiiiiiidiiiiiiiiddiiiiidii")

/* A thread's part of dx; of the residual's gradient only where dy is not itself the gradient. */
typedef struct {
    int64_t dtype, kind;
    const void *x, *dy, *y;
    const uint8_t *mask;
    Statistics s;
    const double *summed;
    double element_weight;
    void *dx, *dresidual;
    int64_t C, S, n0, n1, c0, c1;
} FinishBackward;

static int finish_backward(const Loops *loops, const FinishBackward *a)
{
    const int64_t C = a->C;
    double *memory = malloc(5 * C * sizeof(double));
    if (!memory)
        return -1;
    double *y_scale = memory, *y_shift = y_scale + C, *slope = y_shift + C, *scale = slope + C;
    double *shift = scale + C;
    output_coefficients(a->s.var, &a->s.affine, a->s.eps, C, y_scale, y_shift);
    for (int64_t c = 0; c < C; c++) {
        const double invstd = 1 / sqrt(a->s.var[c] + a->s.eps), pull = -y_scale[c] * a->element_weight;
        slope[c] = y_scale[c];
        scale[c] = pull * invstd * a->summed[C + c];
        shift[c] = pull * a->summed[c];
    }
    Pass p = {.loops = loops, .x = a->x, .dy = a->dy, .y = a->y, .mask = a->mask, .out = a->dx,
              .more = a->dresidual, .mean = a->s.mean, .scale = scale, .shift = shift, .slope = slope, .y_scale = y_scale,
              .y_shift = y_shift, .C = C, .S = a->S, .n0 = a->n0, .n1 = a->n1, .c0 = a->c0,
              .c1 = a->c1, .kind = (int)a->kind};
    const int failed = elementwise(&p, loops->input_gradient, a->kind == SIGN_OF_X ? 6 : 4);
    free(memory);
    return failed;
}

FUNCTION(finish_backward, FinishBackward, "iiiiiiiiiiididiiiiiiii")

#include "_locate.h"

static PyObject *py_use_level(PyObject *self, PyObject *number)
{
    (void)self;
    const long wanted = PyLong_AsLong(number);
    if (wanted < 0 || wanted >= num_levels())
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "`level` must be below %d", num_levels());
    level = (int)wanted;
    Py_RETURN_NONE;
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL, NULL}

static PyMethodDef functions[] = {
    METHOD(begin_forward),
    METHOD(finish_forward),
    METHOD(begin_backward),
    METHOD(finish_backward),
    METHOD(normalize),
    METHOD(sums),
    METHOD(locate),
    {"use_level", py_use_level, METH_O, "Use these instructions, a place in `levels`, in all threads: for tests."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    const int count = num_levels();
    PyObject *names = PyTuple_New(count);
    for (int i = 0; names && i < count; i++)
        PyTuple_SetItem(names, i, PyUnicode_FromString(LEVELS[i].name));
    level = count - 1;
    if (!names || PyModule_AddObjectRef(module, "levels", names))
        return -1;
    Py_DECREF(names);
    return 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled part of the host kernels.", 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
