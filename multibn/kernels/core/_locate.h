/* Get the addresses, shapes and strides of arrays: from NumPy's array interface struct, and from torch's C functions
for DLPack. This takes some nanoseconds, while the same queries in Python take a microsecond. */

enum { MAX_NDIM = 8 };
/* Dtypes, by DLPack's code and bits. */
enum { INT64 = 0x040, FLOAT16 = 0x210, FLOAT32 = 0x220, FLOAT64 = 0x240, BFLOAT16 = 0x410, BOOL = 0x608 };

typedef struct {
    char *data;
    int dtype, ndim;
    int64_t shape[MAX_NDIM], strides[MAX_NDIM]; /* in elements */
} Array;

typedef struct { /* of NumPy */
    int two, ndim;
    char kind;
    int itemsize, flags;
    const int64_t *shape, *strides; /* in bytes */
    char *data;
} Interface;

typedef struct { /* of DLPack */
    char *data;
    int32_t device_type, device_id; /* type 1 is host memory */
    int32_t ndim;
    uint8_t code, bits; /* of the dtype */
    uint16_t lanes;
    const int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} Tensor;

typedef struct {
    uint32_t major, minor;
    const void *older;
    void *others[3];
    int (*look)(void *tensor, Tensor *found); /* -1, and an exception, if the tensor has no memory */
} Exchange;

static struct {
    PyObject *ndarray, *tensor, *parameter; /* the types; an array of a subclass may be anything */
    const Exchange *exchange;
    PyObject *array_struct, *is_neg; /* names of attributes */
    PyObject *num_threads;           /* a function */
} known;

/* Whether `object` is an array in host memory. It must be writable if a pass `writes` it; otherwise it must not be a
lazily negated torch tensor. */
static int look(PyObject *object, int writes, Array *a)
{
    const PyObject *kind = (PyObject *)Py_TYPE(object);
    const int64_t *shape = NULL, *strides = NULL;
    PyObject *answer = NULL; /* a Python object */
    int there = 0, shift = 0; /* shift: strides are divided by 1 << shift */
    if (kind == known.ndarray) {
        enum { ALIGNED = 0x100, IN_THIS_BYTE_ORDER = 0x200, WRITABLE = 0x400 };
        const int needed = ALIGNED | IN_THIS_BYTE_ORDER | (writes ? WRITABLE : 0);
        answer = PyObject_GetAttr(object, known.array_struct);
        const Interface *i = answer ? PyCapsule_GetPointer(answer, NULL) : NULL;
        if (i && (i->flags & needed) == needed && i->itemsize > 0) {
            const int code = i->kind == 'f' ? 2 : i->kind == 'i' ? 0 : i->kind == 'b' ? 6 : 0xff;
            a->data = i->data, a->dtype = code << 8 | i->itemsize * 8, a->ndim = i->ndim;
            shape = i->shape, strides = i->strides, shift = __builtin_ctz(i->itemsize);
            there = a->data != NULL;
        }
    } else if (known.exchange && (kind == known.tensor || kind == known.parameter)) {
        Tensor t;
        if (!known.exchange->look(object, &t) && t.data && t.device_type == 1 && t.lanes == 1) {
            a->data = t.data + t.byte_offset, a->dtype = t.code << 8 | t.bits, a->ndim = t.ndim;
            shape = t.shape, strides = t.strides;
            answer = writes ? Py_NewRef(Py_False) : PyObject_CallMethodObjArgs(object, known.is_neg, NULL);
            there = answer == Py_False;
        }
    }
    there = there && a->ndim <= MAX_NDIM;
    for (int i = 0; there && i < a->ndim; i++) {
        there = !(strides[i] & ((1 << shift) - 1));
        a->shape[i] = shape[i];
        a->strides[i] = strides[i] >> shift;
    }
    Py_XDECREF(answer);
    if (!there)
        PyErr_Clear(); /* a tensor that torch.func transforms has no address */
    return there;
}

/* The index of a dtype's loops; -1 if there are none. */
static int number_of(int dtype)
{
    return dtype == FLOAT32 ? 0 : dtype == FLOAT64 ? 1 : dtype == FLOAT16 ? 2 : dtype == BFLOAT16 ? 3 : -1;
}

/* The number of elements of an array; -1 if it is not contiguous. */
static int64_t contiguous(const Array *a)
{
    int64_t n = 1;
    for (int i = a->ndim - 1; i >= 0; n *= a->shape[i--])
        if (a->strides[i] != n && a->shape[i] != 1)
            return -1;
    return n;
}

/* The activation of a pass: dense memory in the order (N, C, S), see layout.py. */
typedef struct {
    Array a, mask;    /* a mask has one channel, and the memory order of the activation */
    int64_t sizes[3]; /* S, C, N */
} Activation;

static int lay_out(Activation *x, PyObject *axis)
{
    const Array *a = &x->a;
    int reduced[MAX_NDIM] = {0}, num = 0, part = 0, before = MAX_NDIM;
    if (!PyTuple_Check(axis))
        return 0;
    for (Py_ssize_t j = 0; j < PyTuple_Size(axis); j++) {
        const long i = PyLong_AsLong(PyTuple_GetItem(axis, j));
        if (i < 0 || i >= a->ndim)
            return 0;
        reduced[i] = 1;
    }
    x->mask = *a;
    x->mask.dtype = BOOL;
    for (int i = 0; i < a->ndim; i++) {
        if (!reduced[i])
            x->mask.shape[i] = 1;
        if (!a->shape[i])
            return 0;
        num += a->shape[i] != 1;
    }
    x->sizes[0] = x->sizes[1] = x->sizes[2] = 1;
    for (int64_t stride = 1; num; num--) { /* the last in memory first */
        int i = 0;
        while (i < a->ndim && (a->strides[i] != stride || a->shape[i] == 1))
            i++;
        if (i == a->ndim) /* there are gaps between elements */
            return 0;
        if (!reduced[i] && (part == 2 || i > before)) /* the channels are divided, or in another order */
            return 0;
        if (reduced[i] != (part != 1))
            part++;
        if (!reduced[i])
            before = i;
        x->mask.strides[i] = x->sizes[0] * x->sizes[2];
        x->sizes[part] *= a->shape[i];
        stride *= a->shape[i];
    }
    return 1;
}
