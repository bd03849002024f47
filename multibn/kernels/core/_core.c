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

#include "_arguments.h"

/* A thread's part of an activation; all of it for zeros. */
typedef struct {
    int64_t n0, n1, c0, c1;
} Task;

static Task task_of(const Input *i, Task t) { return t.c1 ? t : (Task){0, i->N, 0, i->C}; }

/* A pass over a part of an activation, which makes moments unless the caller says more. */
static Pass pass_of(const Loops *loops, const Input *i, Task part)
{
    const Task t = task_of(i, part);
    return (Pass){.loops = loops, .x = i->x, .mask = i->mask, .C = i->C, .S = i->S, .n0 = t.n0, .n1 = t.n1, .c0 = t.c0,
                  .c1 = t.c1, .kind = MOMENTS};
}

/* Moments of x about a centre: `mean` if `again`, else the mean of the first values. `sums` are
those of `sums`, or NULL: then they are made here, a second time if the centre was far. */
typedef struct {
    Input i;
    double *packed, weight, count;
    int64_t parts;
    double *sums, *mean, *var;
    int64_t again;
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

static int64_t begin_forward(const Loops *loops, const BeginForward *a, double *memory)
{
    const int64_t C = a->i.C, parts = a->sums ? at_least(a->parts, 1) : 1; /* the memory is for one */
    double *mean = a->mean ? a->mean : memory, *var = a->var ? a->var : memory + C;
    double *sums = a->sums ? a->sums : memory + 2 * C;
    const double count = !a->i.mask ? a->i.N * a->i.S : a->count > 1 ? a->count : 1;
    Pass p = pass_of(loops, &a->i, (Task){0});
    p.mean = mean;
    p.sums = sums;
    int64_t far = 0;
    for (int64_t again = a->again; again < 2; again++) {
        centre(&p, a->i.dtype, a->i.N, again, mean);
        if (!a->sums && sum_parts(&p, a->i.N, parts, 0, 1))
            return -1;
        far = finish_moments(sums, mean, var, count, C, parts);
        if (!far || a->sums)
            break;
    }
    if (a->packed)
        pack(mean, var, a->packed, C, a->weight, a->count);
    return a->sums ? far : 0;
}

/* An Input, the payload or None, what the rank counts for, its elements per channel, a task. */
static void read_begin_forward(Call *call, PyObject *const *args, BeginForward *a)
{
    int64_t numbers[5];
    a->i = input(call, args[0]);
    a->packed = take(call, args[1], FORWARD | WRITTEN, NULL).at;
    a->weight = number(call, args[2]);
    a->count = number(call, args[3]);
    task(call, args[4], numbers, 5);
    a->parts = numbers[0];
    a->sums = (double *)numbers[1];
    a->mean = (double *)numbers[2];
    a->var = (double *)numbers[3];
    a->again = numbers[4];
}

FUNCTION(begin_forward, BeginForward, 5)

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

/* One thread's part of `begin_forward`, if there is no dy, or of `begin_backward`. */
typedef struct {
    Gradient g;
    double *sums;
    int64_t parts, first, step, c0, c1;
} Sums;

static int sums(const Loops *loops, const Sums *a, double *memory)
{
    const Gradient *g = &a->g;
    Pass p = pass_of(loops, &g->i, (Task){.c0 = a->c0, .c1 = a->c1});
    p.sums = a->sums;
    p.mean = g->s.mean;
    if (g->dy) {
        p.dy = g->dy;
        p.y = g->y;
        p.kind = kind_of(g);
        p.scale = memory;
        p.shift = memory + p.C;
        if (p.kind == SIGN_OF_X)
            output_coefficients(&g->s, p.C, memory, memory + p.C);
    } else {
        if (p.mean)
            memcpy(memory, p.mean, p.C * sizeof(double));
        centre(&p, g->i.dtype, g->i.N, p.mean != NULL, memory);
        p.mean = memory;
    }
    return sum_parts(&p, g->i.N, a->parts, a->first, a->step);
}

/* An Input and the address of a mean, or 0; or a Gradient and 0. Then the address of the sums, a task. */
static void read_sums(Call *call, PyObject *const *args, Sums *a)
{
    if ((PyObject *)Py_TYPE(args[0]) == records[GRADIENT_RECORD].type) {
        read_gradient(call, args[0], &a->g);
    } else {
        a->g.i = input(call, args[0]);
        a->g.s.mean = PyLong_AsVoidPtr(args[1]);
    }
    a->sums = PyLong_AsVoidPtr(args[2]);
    task(call, args[3], &a->parts, 5);
}

FUNCTION(sums, Sums, 4)

/* Sums of dy and of dy * xhat, into the message and the gradients of weight and bias. `sums` are those of `sums`,
or NULL: then they are made here. */
typedef struct {
    Sums s;
    double *packed;
    Parameter dweight, dbias;
} BeginBackward;

static int begin_backward(const Loops *loops, BeginBackward *a, double *memory)
{
    const Statistics *s = &a->s.g.s;
    const int64_t C = a->s.g.i.C, parts = a->s.parts = a->s.sums ? at_least(a->s.parts, 1) : 1;
    if (!a->s.sums) {
        a->s.step = 1, a->s.c1 = C;
        a->s.sums = memory + 2 * C;
        if (sums(loops, &a->s, memory))
            return -1;
    }
    for (int64_t c = 0; c < 2 * C; c++) {
        a->packed[c] = 0;
        for (int64_t p = 0; p < parts; p++)
            a->packed[c] += a->s.sums[2 * p * C + c];
    }
    for (int64_t c = 0; c < C; c++)
        a->packed[C + c] /= sqrt(s->var[c] + s->eps);
    if (a->dbias.at)
        put(a->packed, C, a->dbias, 0);
    if (a->dweight.at)
        put(a->packed + C, C, a->dweight, 0);
    return 0;
}

/* A Gradient, the payload, the gradients of weight and bias or None, and of `sums` their parts and address. */
static void read_begin_backward(Call *call, PyObject *const *args, BeginBackward *a)
{
    int64_t numbers[2];
    read_gradient(call, args[0], &a->s.g);
    a->packed = take(call, args[1], BACKWARD | WRITTEN, NULL).at;
    a->dweight = take(call, args[2], CHANNELS | WRITTEN, NULL);
    a->dbias = take(call, args[3], CHANNELS | WRITTEN, NULL);
    task(call, args[4], numbers, 2);
    a->s.parts = numbers[0];
    a->s.sums = (double *)numbers[1];
}

FUNCTION(begin_backward, BeginBackward, 5)

/* A thread's part of y. */
typedef struct {
    Input i;
    const void *residual;
    Statistics s;
    void *y;
    Task task;
} Normalize;

static int normalize(const Loops *loops, const Normalize *a, double *memory)
{
    Pass p = pass_of(loops, &a->i, a->task);
    p.y = a->residual;
    p.out = a->y;
    p.mean = a->s.mean;
    p.scale = memory;
    p.shift = memory + p.C;
    p.kind = a->i.relu ? SIGN_OF_X : GRADIENT;
    output_coefficients(&a->s, p.C, memory, memory + p.C);
    return elementwise(&p, loops->normalize, 3);
}

static void read_pass(Call *call, PyObject *const *args, Normalize *a, int written)
{
    a->i = input(call, args[0]);
    a->residual = take(call, get_field(call, args[0], Input_residual), LIKE_X, "residual").at;
    a->s = statistics(call, args[0], args[1], written);
    a->y = take(call, args[2], LIKE_X | WRITTEN, NULL).at;
    task(call, args[3], &a->task.n0, 4);
}

/* An Input, BatchStatistics, y, a task. */
static void read_normalize(Call *call, PyObject *const *args, Normalize *a) { read_pass(call, args, a, 0); }

FUNCTION(normalize, Normalize, 4)

/* Writes the statistics of the message, moves the running statistics, and then a part of y: none where threads
are to follow. Returns the state of the message. */
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
    const Task t = task_of(&a->n.i, a->n.task);
    return t.n0 < t.n1 ? normalize(loops, &a->n, memory) : RIGHT;
}

/* An Input, BatchStatistics, y, a task, the sum of all messages, and as `begin_forward` weight and count. */
static void read_finish_forward(Call *call, PyObject *const *args, FinishForward *a)
{
    read_pass(call, args, &a->n, WRITTEN);
    a->summed = take(call, args[4], FORWARD, NULL).at;
    a->weight = number(call, args[5]);
    a->count = number(call, args[6]);
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

FUNCTION(finish_forward, FinishForward, 7)

/* A thread's part of dx; of the residual's gradient only where dy is not itself the gradient. */
typedef struct {
    Gradient g;
    const double *summed;
    double element_weight;
    void *dx, *dresidual;
    Task task;
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
    Pass p = pass_of(loops, &g->i, a->task);
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
    return elementwise(&p, loops->input_gradient, p.kind == SIGN_OF_X ? 6 : 4);
}

/* A Gradient, the sum of all messages, dx, the gradient of the residual or None, a task. */
static void read_finish_backward(Call *call, PyObject *const *args, FinishBackward *a)
{
    read_gradient(call, args[0], &a->g);
    a->summed = take(call, args[1], BACKWARD, NULL).at;
    PyObject *batch = get_field(call, args[0], Gradient_batch);
    a->element_weight = number(call, get_field(call, batch, Batch_element_weight));
    a->dx = take(call, args[2], LIKE_X | WRITTEN, NULL).at;
    a->dresidual = take(call, args[3], LIKE_X | WRITTEN, NULL).at;
    task(call, args[4], &a->task.n0, 4);
}

FUNCTION(finish_backward, FinishBackward, 5)

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
