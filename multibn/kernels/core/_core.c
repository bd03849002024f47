/* The compiled part of the host kernels: loops over activations, and the steps between them.

Python passes arrays, `_locate.h` gets their pointers and strides, and a function returns None for
arrays that it does not support; Python allocates the results and owns all memory. `reference.py` says what
each function computes; `_passes.h` has the passes, `_loops.h` their innermost loops, and `_steps.h`
the steps between passes and messages; `_launches.h` runs a GPU's launches. The core needs GCC or Clang (vector types)
and uses CPython's stable ABI: one build serves all versions of Python from 3.10 on.

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

#include "_launches.h"

/* Write the rounded centre of the moments: first the mean of each channel's first values, which is exact if they are
equal; `again`, the mean. */
static void centre(const Pass *p, int64_t dtype, int64_t again, double *mean)
{
    double *const value = p->sums, *const rest = p->sums + p->C; /* before the sums are made */
    int64_t n = 0;
    for (int64_t i = 0; i < p->n1 * p->S && n < FEW && !again; i++)
        if (!p->mask || p->mask[i]) {
            const int64_t first = i / p->S * p->C * p->S + i % p->S;
            get((Parameter){(void *)p->x, dtype}, first, p->S, p->C, n ? value : mean);
            for (int64_t c = 0; c < p->C; c++)
                rest[c] = n ? rest[c] + (value[c] - mean[c]) : 0;
            n++;
        }
    for (int64_t c = 0; c < p->C; c++)
        mean[c] = rounded(p->loops, again ? mean[c] : n ? mean[c] + rest[c] / n : 0);
}

static int begin_forward(Call *a, double *memory)
{
    Pass *p = &a->pass;
    const int64_t C = p->C;
    double *mean = memory, *var = memory + C;
    const double count = !p->mask ? p->n1 * p->S : a->count > 1 ? a->count : 1;
    p->mean = mean;
    p->sums = memory + 2 * C;
    for (int again = 0; again < 2; again++) { /* a second time, about the mean, if the first centre was far from it */
        centre(p, a->dtype, again, mean);
        if (in_threads(p, 0))
            return -1;
        if (!finish_moments(p->sums, mean, var, count, C))
            break;
    }
    pack(mean, var, a->message, C, a->weight, a->count, a->mark);
    return 0;
}

/* Arguments: NormArgs, the payload, the rank's weight, its elements per channel, its mark. */
static void read_begin_forward(Call *a, PyObject *const *args)
{
    read_input(a, args[0]);
    a->message = take(a, args[1], FLOAT64, 2 * a->pass.C + NUM_SCALARS, WRITTEN).at;
    a->weight = number(a, args[2]);
    a->count = number(a, args[3]);
    a->mark = number(a, args[4]);
}

FUNCTION(begin_forward, 5)

static void read_gradient(Call *a, PyObject *tuple)
{
    PyObject *i = get_field(a, tuple, Gradient_input), *batch = get_field(a, tuple, Gradient_batch);
    read_input(a, i);
    a->pass.dy = take_like(a, get_field(a, tuple, Gradient_dy), &a->x.a, 0);
    a->pass.y = take_like(a, get_field(a, tuple, Gradient_y), &a->x.a, OPTIONAL);
    a->pass.kind = a->pass.y ? SIGN_OF_Y : PyObject_IsTrue(get_field(a, i, NormArgs_relu)) ? SIGN_OF_X : GRADIENT;
    read_statistics(a, i, batch, 0);
}

/* Write the sums of dy and of dy * xhat into the message and the gradients of weight and bias. */
static int begin_backward(Call *a, double *memory)
{
    Pass *p = &a->pass;
    const Statistics *s = &a->statistics;
    const int64_t C = p->C;
    p->scale = memory;
    p->shift = memory + C;
    p->sums = memory + 2 * C;
    if (p->kind == SIGN_OF_X)
        output_coefficients(s, C, memory, memory + C);
    if (in_threads(p, 0))
        return -1;
    for (int64_t c = 0; c < C; c++) {
        a->message[c] = p->sums[c];
        a->message[C + c] = p->sums[C + c] / std_of(s, c);
    }
    if (a->dbias.at)
        put(a->message, C, a->dbias);
    if (a->dweight.at)
        put(a->message + C, C, a->dweight);
    return 0;
}

/* Arguments: a Gradient, the payload, the gradients of weight and bias, or None. */
static void read_begin_backward(Call *a, PyObject *const *args)
{
    read_gradient(a, args[0]);
    a->message = take(a, args[1], FLOAT64, 2 * a->pass.C, WRITTEN).at;
    a->dweight = take(a, args[2], ANY_FLOAT, a->pass.C, WRITTEN | OPTIONAL);
    a->dbias = take(a, args[3], ANY_FLOAT, a->pass.C, WRITTEN | OPTIONAL);
}

FUNCTION(begin_backward, 4)

/* Run a pass with `num` coefficients; or, for compiled code, write up to four of them, as rows of an array. */
static int finish(Call *a, int num)
{
    char *const rows = a->coefficients.at;
    if (!rows)
        return in_threads(&a->pass, num);
    const int64_t row = a->pass.C * a->pass.loops->size;
    num = num < 4 ? num : 4;
    set_coefficients(&a->pass, num, (char *[]){rows, rows + row, rows + (num - 1) * row, rows + 2 * row});
    return 0;
}

static int normalize(Call *a, double *memory)
{
    Pass *p = &a->pass;
    p->scale = memory;
    p->shift = memory + p->C;
    output_coefficients(&a->statistics, p->C, memory, memory + p->C);
    return finish(a, 3);
}

static void read_pass(Call *a, PyObject *const *args, int written)
{
    read_input(a, args[0]);
    a->pass.y = take_like(a, get_field(a, args[0], NormArgs_residual), &a->x.a, OPTIONAL);
    a->pass.kind = PyObject_IsTrue(get_field(a, args[0], NormArgs_relu)) ? OUTPUT_OF_RELU : OUTPUT;
    read_statistics(a, args[0], args[1], written);
    take_output(a, args[2], args[3], 3);
}

/* Arguments: NormArgs, PackedStatistics, the output, whether it gets coefficients instead. */
static void read_normalize(Call *a, PyObject *const *args) { read_pass(a, args, 0); }

FUNCTION(normalize, 4)

/* Write the statistics, the running statistics and then y. Returns the state of the message. */
static int finish_forward(Call *a, double *memory)
{
    const Statistics *s = &a->statistics;
    const double least = a->dtype == 1 ? 0x1p-13 : 0x1p-27; /* see spec.py */
    const int state = unpack(a->message, s, a->pass.C, a->weight, a->count, least);
    if (state != OK)
        return state;
    if (a->running.mean.at)
        move(&a->running, s, a->pass.C, a->count, memory);
    return normalize(a, memory); /* 0, which is OK */
}

/* Arguments: those of `normalize`, the sum of all messages, the rank's weight, its elements per channel. */
static void read_finish_forward(Call *a, PyObject *const *args)
{
    read_pass(a, args, WRITTEN);
    a->message = take(a, args[4], FLOAT64, 2 * a->pass.C + NUM_SCALARS, 0).at;
    a->weight = number(a, args[5]);
    a->count = number(a, args[6]);
    PyObject *running = get_field(a, args[0], NormArgs_running);
    if (running == Py_None)
        return;
    Running *r = &a->running;
    r->mean = take(a, get_field(a, running, Running_mean), ANY_FLOAT, a->pass.C, WRITTEN);
    r->var = take(a, get_field(a, running, Running_var), ANY_FLOAT, a->pass.C, WRITTEN);
    r->num_batches = take(a, get_field(a, running, Running_num_batches), INT64, 1, WRITTEN | OPTIONAL).at;
    PyObject *momentum = get_field(a, running, Running_momentum);
    r->momentum = momentum == Py_None ? NAN : number(a, momentum);
    PyObject *word = get_field(a, running, Running_convention);
    while (r->convention < NUM_CONVENTIONS &&
           !(PyUnicode_Check(word) && !PyUnicode_CompareWithASCIIString(word, CONVENTIONS[r->convention])))
        r->convention++;
    if (r->convention == NUM_CONVENTIONS)
        a->refused = 1;
}

FUNCTION(finish_forward, 7)

/* Write dx, and the residual's gradient unless it is dy. */
static int finish_backward(Call *a, double *memory)
{
    Pass *p = &a->pass;
    const Statistics *s = &a->statistics;
    const int64_t C = p->C;
    double *y_scale = memory, *y_shift = y_scale + C, *scale = y_shift + C, *shift = scale + C;
    output_coefficients(s, C, y_scale, y_shift);
    for (int64_t c = 0; c < C; c++) {
        const double invstd = 1 / std_of(s, c), pull = -y_scale[c] * *s->element_weight;
        scale[c] = pull * invstd * a->message[C + c];
        shift[c] = pull * a->message[c];
    }
    p->scale = scale;
    p->shift = shift;
    p->y_scale = y_scale;
    p->y_shift = y_shift;
    return finish(a, p->kind == SIGN_OF_X ? 5 : 4);
}

/* Arguments: a Gradient, the sum of all messages, dx, whether it gets coefficients instead, the residual's gradient or
None. */
static void read_finish_backward(Call *a, PyObject *const *args)
{
    read_gradient(a, args[0]);
    a->message = take(a, args[1], FLOAT64, 2 * a->pass.C, 0).at;
    take_output(a, args[2], args[3], 4);
    a->pass.more = take_like(a, args[4], &a->x.a, WRITTEN | OPTIONAL);
}

FUNCTION(finish_backward, 5)

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
    METHOD(run_launches),
    {"use", py_use, METH_VARARGS, "Register the fields of the named tuples, the types of arrays, and torch's functions."},
    {"use_level", py_use_level, METH_O, "Use these instructions, a place in `levels`, in all threads: for tests."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module)
{
    static const char *const formats[] = {"(s)", "(ss)", "(sss)"};
    level = num_levels() - 1;
    PyObject *levels = Py_BuildValue(formats[level], "baseline", "avx2", "avx512");
    PyObject *fields = Py_BuildValue("(ssss)", FIELDS[0], FIELDS[1], FIELDS[2], FIELDS[3]);
    return PyModule_AddObject(module, "levels", levels) || PyModule_AddObject(module, "fields", fields) ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_core", "The compiled part of the host kernels.", 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&definition); }
