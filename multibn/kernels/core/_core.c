/* The compiled part of the host kernels: loops over activations, and the steps between them.

Python hands over arrays, `_locate.h` finds out where they lie, and a function takes them or says
that it cannot; Python makes the results and looks after the life of all. `generic.py` says what
each function computes; `_passes.h` has the passes, `_loops.h` their innermost loops, and `_steps.h`
the steps between passes and messages. The core needs GCC or Clang (vector types) and uses CPython's
stable ABI: one build serves all versions of Python from 3.10 on.

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
#include "_steps.h"

#include "_threads.h"

#include "_arguments.h"

/* A pass over an activation, which makes moments unless the caller says more. */
static Pass pass_of(const Loops *loops, const Input *i)
{
    return (Pass){.loops = loops, .x = i->x, .mask = i->mask, .C = i->C, .S = i->S, .n1 = i->N, .c1 = i->C,
                  .kind = MOMENTS, .threads = i->threads, .parts = parts_of(i->N, i->C, i->S)};
}

/* Moments of x. */
typedef struct {
    Input i;
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
    double value[PIECE], rest[PIECE];
    for (int64_t c = p->c0, few; c < p->c1; c += few) {
        few = at_most(PIECE, p->c1 - c);
        for (int64_t i = 0; i < n; i++) {
            get((Parameter){(void *)p->x, dtype}, at[i] + c * p->S, p->S, few, i ? value : mean + c);
            for (int64_t j = 0; j < few; j++)
                rest[j] = i ? rest[j] + (value[j] - mean[c + j]) : 0;
        }
        for (int64_t j = 0; j < few; j++) {
            if (!again)
                mean[c + j] = n ? mean[c + j] + rest[j] / n : 0;
            mean[c + j] = rounded(p->loops, mean[c + j]);
        }
    }
}

static int begin_forward(const Loops *loops, const BeginForward *a, double *memory)
{
    const int64_t C = a->i.C;
    double *mean = memory, *var = memory + C;
    const double count = !a->i.mask ? a->i.N * a->i.S : a->count > 1 ? a->count : 1;
    Pass p = pass_of(loops, &a->i);
    p.mean = mean;
    p.sums = memory + 2 * C;
    for (int again = 0; again < 2; again++) { /* a second time, about the mean, if the first centre was far from it */
        centre(&p, a->i.dtype, a->i.N, again, mean);
        if (sum_in_threads(&p))
            return -1;
        if (!finish_moments(p.sums, mean, var, count, C, p.parts))
            break;
    }
    pack(mean, var, a->packed, C, a->weight, a->count);
    return 0;
}

/* An Input, the payload, what the rank counts for, its elements per channel. */
static void read_begin_forward(Call *call, PyObject *const *args, BeginForward *a)
{
    a->i = input(call, args[0]);
    a->packed = take(call, args[1], FORWARD | WRITTEN, NULL).at;
    a->weight = number(call, args[2]);
    a->count = number(call, args[3]);
}

FUNCTION(begin_forward, BeginForward, 4)

/* What the passes backward read. */
typedef struct {
    Input i;
    const void *dy, *y;
    Statistics s;
} Gradient;

static void read_gradient(Call *call, PyObject *tuple, Gradient *g)
{
    if (!is_plain(call, tuple, GRADIENT_RECORD))
        return;
    PyObject *i = get_field(call, tuple, Gradient_input);
    g->i = input(call, i);
    g->dy = take(call, get_field(call, tuple, Gradient_dy), LIKE_X, "dy").at;
    g->y = take(call, get_field(call, tuple, Gradient_y), LIKE_X, "y").at;
    g->s = statistics(call, i, get_field(call, tuple, Gradient_batch), 0);
}

static int kind_of(const Gradient *g) { return g->y ? SIGN_OF_Y : g->i.relu ? SIGN_OF_X : GRADIENT; }

/* Sums of dy and of dy * xhat, into the message and the gradients of weight and bias. */
typedef struct {
    Gradient g;
    double *packed;
    Parameter dweight, dbias;
} BeginBackward;

static int begin_backward(const Loops *loops, const BeginBackward *a, double *memory)
{
    const Gradient *g = &a->g;
    const int64_t C = g->i.C;
    Pass p = pass_of(loops, &g->i);
    p.dy = g->dy;
    p.y = g->y;
    p.mean = g->s.mean;
    p.scale = memory;
    p.shift = memory + C;
    p.sums = memory + 2 * C;
    p.kind = kind_of(g);
    if (p.kind == SIGN_OF_X)
        output_coefficients(&g->s, C, memory, memory + C);
    if (sum_in_threads(&p))
        return -1;
    for (int64_t c = 0; c < 2 * C; c++) {
        a->packed[c] = 0;
        for (int64_t i = 0; i < p.parts; i++)
            a->packed[c] += p.sums[2 * i * C + c];
    }
    for (int64_t c = 0; c < C; c++)
        a->packed[C + c] /= sqrt(g->s.var[c] + g->s.eps);
    if (a->dbias.at)
        put(a->packed, C, a->dbias, 0);
    if (a->dweight.at)
        put(a->packed + C, C, a->dweight, 0);
    return 0;
}

/* A Gradient, the payload, the gradients of weight and bias or None. */
static void read_begin_backward(Call *call, PyObject *const *args, BeginBackward *a)
{
    read_gradient(call, args[0], &a->g);
    a->packed = take(call, args[1], BACKWARD | WRITTEN, NULL).at;
    a->dweight = take(call, args[2], CHANNELS | WRITTEN, NULL);
    a->dbias = take(call, args[3], CHANNELS | WRITTEN, NULL);
}

FUNCTION(begin_backward, BeginBackward, 4)

typedef struct {
    Input i;
    const void *residual;
    Statistics s;
    void *y;
} Normalize;

static int normalize(const Loops *loops, const Normalize *a, double *memory)
{
    Pass p = pass_of(loops, &a->i);
    p.y = a->residual;
    p.out = a->y;
    p.mean = a->s.mean;
    p.scale = memory;
    p.shift = memory + p.C;
    p.kind = a->i.relu ? SIGN_OF_X : GRADIENT;
    output_coefficients(&a->s, p.C, memory, memory + p.C);
    return write_in_threads(&p, loops->normalize, 3);
}

static void read_pass(Call *call, PyObject *const *args, Normalize *a, int written)
{
    a->i = input(call, args[0]);
    a->residual = take(call, get_field(call, args[0], Input_residual), LIKE_X, "residual").at;
    a->s = statistics(call, args[0], args[1], written);
    a->y = take(call, args[2], LIKE_X | WRITTEN, NULL).at;
}

/* An Input, BatchStatistics, y. */
static void read_normalize(Call *call, PyObject *const *args, Normalize *a) { read_pass(call, args, a, 0); }

FUNCTION(normalize, Normalize, 3)

/* Writes the statistics of the message, moves the running statistics, and then y. Returns the state of the message. */
typedef struct {
    Normalize n; /* mean and var are written */
    const double *summed;
    double weight, count, *total, *element_weight;
    Running running;
} FinishForward;

static int finish_forward(const Loops *loops, const FinishForward *a, double *memory)
{
    double *mean = (double *)a->n.s.mean, *var = (double *)a->n.s.var;
    const int state = unpack(a->summed, mean, var, a->total, a->element_weight, a->n.i.C, a->weight, a->count,
                             a->n.i.dtype == 1 ? 0x1p-13 : 0x1p-27, a->n.s.eps);
    if (state != RIGHT)
        return state;
    if (a->running.mean.at)
        move(&a->running, mean, var, a->n.i.C, *a->total, a->count);
    return normalize(loops, &a->n, memory); /* 0, which is RIGHT */
}

/* An Input, BatchStatistics, y, the sum of all messages, and as `begin_forward` weight and count. */
static void read_finish_forward(Call *call, PyObject *const *args, FinishForward *a)
{
    read_pass(call, args, &a->n, WRITTEN);
    a->summed = take(call, args[3], FORWARD, NULL).at;
    a->weight = number(call, args[4]);
    a->count = number(call, args[5]);
    a->total = take(call, get_field(call, args[1], Batch_count), ONE | WRITTEN, NULL).at;
    a->element_weight = take(call, get_field(call, args[1], Batch_element_weight), ONE | WRITTEN, NULL).at;
    PyObject *running = get_field(call, args[0], Input_running);
    if (running == Py_None)
        return;
    if (!is_plain(call, running, RUNNING_RECORD)) {
        call->refused = "running";
        return;
    }
    Running *r = &a->running;
    r->mean = take(call, get_field(call, running, Running_mean), AS_MANY | WRITTEN, "running");
    r->var = take(call, get_field(call, running, Running_var), AS_MANY | WRITTEN, "running");
    r->num_batches = take(call, get_field(call, running, Running_num_batches), COUNTER | WRITTEN, "running").at;
    r->momentum = number(call, get_field(call, running, Running_momentum));
    PyObject *word = get_field(call, running, Running_convention);
    while (r->convention < NUM_CONVENTIONS &&
           !(PyUnicode_Check(word) && !PyUnicode_CompareWithASCIIString(word, CONVENTIONS[r->convention])))
        r->convention++;
    if (r->convention == NUM_CONVENTIONS)
        refuse(call, "running");
}

FUNCTION(finish_forward, FinishForward, 6)

/* dx, and the residual's gradient where dy is not itself the gradient. */
typedef struct {
    Gradient g;
    const double *summed;
    double element_weight;
    void *dx, *dresidual;
} FinishBackward;

static int finish_backward(const Loops *loops, const FinishBackward *a, double *memory)
{
    const Gradient *g = &a->g;
    const int64_t C = g->i.C;
    double *y_scale = memory, *y_shift = y_scale + C, *scale = y_shift + C, *shift = scale + C;
    output_coefficients(&g->s, C, y_scale, y_shift);
    for (int64_t c = 0; c < C; c++) {
        const double invstd = 1 / sqrt(g->s.var[c] + g->s.eps), pull = -y_scale[c] * a->element_weight;
        scale[c] = pull * invstd * a->summed[C + c];
        shift[c] = pull * a->summed[c];
    }
    Pass p = pass_of(loops, &g->i);
    p.dy = g->dy;
    p.y = g->y;
    p.out = a->dx;
    p.more = a->dresidual;
    p.mean = g->s.mean;
    p.scale = scale;
    p.shift = shift;
    p.y_scale = y_scale;
    p.y_shift = y_shift;
    p.kind = kind_of(g);
    return write_in_threads(&p, loops->input_gradient, p.kind == SIGN_OF_X ? 6 : 4);
}

/* A Gradient, the sum of all messages, dx, the gradient of the residual or None. */
static void read_finish_backward(Call *call, PyObject *const *args, FinishBackward *a)
{
    read_gradient(call, args[0], &a->g);
    a->summed = take(call, args[1], BACKWARD, NULL).at;
    PyObject *batch = get_field(call, args[0], Gradient_batch);
    a->element_weight = number(call, get_field(call, batch, Batch_element_weight));
    a->dx = take(call, args[2], LIKE_X | WRITTEN, NULL).at;
    a->dresidual = take(call, args[3], LIKE_X | WRITTEN, NULL).at;
}

FUNCTION(finish_backward, FinishBackward, 4)

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
    {"use_fields", py_use_fields, METH_VARARGS, "The named tuples of the arguments."},
    {"use_arrays", py_use_arrays, METH_VARARGS, "The types of arrays, and how to look at them."},
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
