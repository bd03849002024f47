/* Arguments of functions for Python: the named tuples of spec.py, whose fields are read by name, and arrays. */

#include "_locate.h"

/* The fields that the core reads, or that do not affect what it computes. */
#define ARGS_FIELDS(F)                                                                                       \
    F(NormArgs, x) F(NormArgs, weight) F(NormArgs, bias) F(NormArgs, eps) F(NormArgs, axis)                   \
    F(NormArgs, residual) F(NormArgs, relu) F(NormArgs, running) F(NormArgs, mask)
#define GRADIENT_FIELDS(F) F(Gradient, dy) F(Gradient, input) F(Gradient, batch) F(Gradient, y) F(Gradient, needs_dx)
#define BATCH_FIELDS(F) F(Batch, numbers) F(Batch, shape)
#define RUNNING_FIELDS(F)                                                                                     \
    F(Running, mean) F(Running, var) F(Running, momentum) F(Running, convention) F(Running, num_batches)

#define PLACE(record, name) record##_##name,
#define NAME(record, name) " " #name
enum { ARGS_FIELDS(PLACE) GRADIENT_FIELDS(PLACE) BATCH_FIELDS(PLACE) RUNNING_FIELDS(PLACE) NUM_FIELDS };
static const char *const FIELDS[] = {ARGS_FIELDS(NAME), GRADIENT_FIELDS(NAME), BATCH_FIELDS(NAME), RUNNING_FIELDS(NAME)};
#undef NAME

static Py_ssize_t places[NUM_FIELDS]; /* of the fields in their named tuples */

/* Arguments: the places; num_threads; numpy.ndarray; torch.Tensor, torch.nn.Parameter and the capsule of torch's DLPack
functions, or None for each without torch. */
static PyObject *py_use(PyObject *self, PyObject *args)
{
    PyObject *found, *capsule;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOO", &found, &known.num_threads, &known.ndarray, &known.tensor, &known.parameter,
                          &capsule))
        return NULL;
    for (int f = 0; f < NUM_FIELDS; f++)
        places[f] = PyLong_AsSsize_t(PyList_GetItem(found, f));
    if (capsule != Py_None && !(known.exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api")))
        return NULL;
    Py_INCREF(args); /* the types live as long as the process */
    known.array_struct = PyUnicode_InternFromString("__array_struct__");
    known.is_neg = PyUnicode_InternFromString("is_neg");
    Py_RETURN_NONE;
}

/* The arguments of a call, filled by `read_<name>`. Once the call is refused, no further argument is read. */
typedef struct {
    int refused; /* whether the core does not support an argument, or an exception is set */
    Activation x;
    int64_t dtype; /* of x */
    Pass pass;
    Statistics statistics;
    Running running;
    double *message, weight, count, mark; /* the payload or the sum; this rank's weight, elements per channel, mark */
    Parameter dweight, dbias, coefficients; /* coefficients: output for compiled code, instead of a pass */
} Call;

/* A field of a record; borrowed. None once the call is refused. */
static PyObject *get_field(Call *call, PyObject *record, int field)
{
    PyObject *found = call->refused ? NULL : PyTuple_GetItem(record, places[field]);
    call->refused = !found;
    return found ? found : Py_None;
}

enum { ANY_FLOAT = 0, WRITTEN = 1, OPTIONAL = 2 };

/* The data of an array with the dtype, shape and memory order of `other`; NULL if it is OPTIONAL and None. */
static void *take_like(Call *call, PyObject *object, const Array *other, int how)
{
    Array a;
    if (call->refused || (object == Py_None && how & OPTIONAL))
        return NULL;
    int fits = look(object, how & WRITTEN, &a) && a.dtype == other->dtype && a.ndim == other->ndim;
    for (int i = 0; fits && i < a.ndim; i++)
        fits = a.shape[i] == other->shape[i] && (a.strides[i] == other->strides[i] || a.shape[i] == 1);
    call->refused = !fits;
    return fits ? a.data : NULL;
}

/* `n` contiguous numbers, of any shape; None is handled as above. */
static Parameter take(Call *call, PyObject *object, int dtype, int64_t n, int how)
{
    Array a;
    if (call->refused || (object == Py_None && how & OPTIONAL))
        return (Parameter){0};
    call->refused = !look(object, how & WRITTEN, &a) || contiguous(&a) != n ||
                    (dtype == ANY_FLOAT ? number_of(a.dtype) < 0 : a.dtype != dtype);
    return call->refused ? (Parameter){0} : (Parameter){a.data, number_of(a.dtype)};
}

/* Memory for the output of a pass, like `x`; or, if `instead` is true, for `rows` coefficients of each channel, in the
dtype of the arithmetic. */
static void take_output(Call *call, PyObject *object, PyObject *instead, int64_t rows)
{
    if (!PyObject_IsTrue(instead)) {
        call->pass.out = take_like(call, object, &call->x.a, WRITTEN);
        return;
    }
    call->coefficients = take(call, object, ANY_FLOAT, rows * call->pass.C, WRITTEN);
    if (call->coefficients.dtype != (call->dtype == 1))
        call->refused = 1;
}

/* The value of a number, or of an array that holds one. */
static double number(Call *call, PyObject *object)
{
    Array a;
    if (call->refused)
        return 0;
    if (!PyFloat_Check(object) && look(object, 0, &a) && a.dtype == FLOAT64 && !a.ndim)
        return *(const double *)a.data;
    return PyFloat_AsDouble(object);
}

static void read_input(Call *call, PyObject *i)
{
    Activation *x = &call->x;
    if (!look(get_field(call, i, NormArgs_x), 0, &x->a) || number_of(x->a.dtype) < 0 ||
        !lay_out(x, get_field(call, i, NormArgs_axis))) {
        call->refused = 1;
        return;
    }
    const int64_t S = x->sizes[0], C = x->sizes[1], N = x->sizes[2];
    call->dtype = number_of(x->a.dtype);
    call->pass = (Pass){
        .x = x->a.data, .C = C, .S = S, .n1 = N, .c1 = C, .parts = parts_of(N, C, S),
        .mask = take_like(call, get_field(call, i, NormArgs_mask), &x->mask, OPTIONAL),
    };
}

/* The statistics and the parameters of a pass; `written` is WRITTEN if the pass writes the statistics. */
static void read_statistics(Call *call, PyObject *i, PyObject *batch, int written)
{
    const int64_t C = call->pass.C;
    double *const numbers = take(call, get_field(call, batch, Batch_numbers), FLOAT64, 2 * C + 2, written).at;
    if (call->refused)
        return;
    call->statistics = (Statistics){
        .mean = numbers,
        .var = numbers + C,
        .count = numbers + 2 * C,
        .element_weight = numbers + 2 * C + 1,
        .weight = take(call, get_field(call, i, NormArgs_weight), ANY_FLOAT, C, OPTIONAL),
        .bias = take(call, get_field(call, i, NormArgs_bias), ANY_FLOAT, C, OPTIONAL),
        .eps = number(call, get_field(call, i, NormArgs_eps)),
    };
    call->pass.mean = call->statistics.mean;
}

enum { KEEP_GIL_BELOW_ELEMENTS = 1 << 14 }; /* a pass over at least this many elements releases the GIL */

/* How many threads may share a pass over this many elements; -1 if Python raised an exception. */
static int64_t num_threads(int64_t elements)
{
    PyObject *found = elements < 2 * SHARE ? NULL : PyObject_CallNoArgs(known.num_threads);
    const int64_t n = found ? PyLong_AsLongLong(found) : elements < 2 * SHARE ? 1 : -1;
    Py_XDECREF(found);
    return n;
}

/* Define a function for Python, whose arguments `read_<name>` reads. It returns the number that `name` returns, or
raises MemoryError if the number is negative. It returns None, and does nothing, if the core does not support the
arguments. `name` gets memory for 2 numbers per channel, and 2 per channel and part. */
#define FUNCTION(name, num_arguments)                                                 \
    static PyObject *py_##name(PyObject *self, PyObject *const *args, Py_ssize_t num) \
    {                                                                                 \
        (void)self;                                                                   \
        return answer(args, num, num_arguments, read_##name, name);                   \
    }

static PyObject *answer(PyObject *const *args, Py_ssize_t num, Py_ssize_t expected,
                        void (*read)(Call *, PyObject *const *), int (*compute)(Call *, double *))
{
    Call call = {0};
    Pass *p = &call.pass;
    if (num != expected)
        return PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, num);
    read(&call, args);
    if (PyErr_Occurred())
        return NULL;
    if (call.refused)
        Py_RETURN_NONE;
    const int64_t elements = p->n1 * p->C * p->S;
    if ((p->threads = num_threads(elements)) < 0)
        return NULL;
    p->loops = LEVELS[level] + call.dtype;
    PyThreadState *thread = elements >= KEEP_GIL_BELOW_ELEMENTS ? PyEval_SaveThread() : NULL;
    double *memory = malloc((2 + 2 * p->parts) * p->C * sizeof(double));
    const int number = memory ? compute(&call, memory) : -1;
    free(memory);
    if (thread)
        PyEval_RestoreThread(thread);
    return number < 0 ? PyErr_NoMemory() : PyLong_FromLong(number);
}
