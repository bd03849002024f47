/* Addresses of torch's tensors, by the C functions that torch offers for DLPack from 2.10 on: a look
at a tensor takes some nanoseconds, where Python's questions about one take a microsecond. */

typedef struct {
    void *data;
    int32_t device_type, device_id; /* type 1 is host memory */
    int32_t ndim;
    uint8_t code, bits; /* of the dtype */
    uint16_t lanes;
    const int64_t *shape, *strides; /* in elements */
    uint64_t byte_offset;
} View;

typedef struct {
    uint32_t major, minor;
    const void *older;
    void *others[3];
    int (*look)(void *tensor, View *view); /* -1, and an exception, if the tensor has no memory */
} Exchange;

/* Whether a tuple has these numbers; the stride of an axis with one element does not matter. */
static int are_equal(PyObject *wanted, const View *v, const int64_t *numbers)
{
    int equal = PyTuple_Check(wanted) && PyTuple_Size(wanted) == v->ndim;
    for (int32_t i = 0; equal && i < v->ndim; i++)
        equal = PyLong_AsLongLong(PyTuple_GetItem(wanted, i)) == numbers[i] ||
                (numbers == v->strides && v->shape[i] == 1);
    return equal;
}

static int is_contiguous(const View *v)
{
    int64_t stride = 1;
    int contiguous = 1;
    for (int32_t i = v->ndim - 1; i >= 0; i--) {
        contiguous &= v->strides[i] == stride || v->shape[i] == 1;
        stride *= v->shape[i];
    }
    return contiguous;
}

/* The address of a tensor; NULL if the tensor is not as its group says, or has no address. */
static void *locate_one(PyObject *a, const Exchange *exchange, PyObject *kinds, long dtype, PyObject *shape,
                        PyObject *strides)
{
    PyObject *kind = (PyObject *)Py_TYPE(a);
    View v;
    if (kind != PyTuple_GetItem(kinds, 0) && kind != PyTuple_GetItem(kinds, 1))
        return NULL;
    if (exchange->look(a, &v) || v.device_type != 1 || (v.code << 8 | v.bits) != dtype || v.lanes != 1)
        return NULL;
    if (!are_equal(shape, &v, v.shape) || !(strides == Py_None ? is_contiguous(&v) : are_equal(strides, &v, v.strides)))
        return NULL;
    return v.data ? (char *)v.data + v.byte_offset : NULL;
}

/* locate((capsule, types of tensors, numbers of dtypes, "is_neg"), *groups): see Torch in _memory.py. */
static PyObject *py_locate(PyObject *self, PyObject *const *args, Py_ssize_t num)
{
    (void)self;
    PyObject *capsule, *kinds, *dtypes, *is_neg, *arrays, *dtype, *shape, *strides;
    if (num < 1 || !PyArg_ParseTuple(args[0], "OO!OO", &capsule, &PyTuple_Type, &kinds, &dtypes, &is_neg))
        return NULL;
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyObject *addresses = exchange ? PyList_New(0) : NULL;
    for (Py_ssize_t g = 1; addresses && g < num; g++) {
        dtype = PyTuple_GetItem(args[g], 1), shape = PyTuple_GetItem(args[g], 2);
        strides = PyTuple_GetItem(args[g], 3);
        arrays = strides ? PySequence_Tuple(PyTuple_GetItem(args[g], 0)) : NULL;
        if (!arrays)
            Py_CLEAR(addresses);
        PyObject *number = addresses ? PyDict_GetItem(dtypes, dtype) : NULL;
        for (Py_ssize_t i = 0; addresses && i < PyTuple_Size(arrays); i++) {
            PyObject *a = PyTuple_GetItem(arrays, i);
            void *at = NULL;
            if (a != Py_None) {
                at = number ? locate_one(a, exchange, kinds, PyLong_AsLong(number), shape, strides) : NULL;
                /* A tensor may be lazily negated. */
                PyObject *negated = at ? PyObject_CallMethodObjArgs(a, is_neg, NULL) : NULL;
                Py_XDECREF(negated);
                if (negated != Py_False) {
                    PyErr_Clear(); /* a tensor that torch.func transforms has no address */
                    Py_DECREF(addresses);
                    Py_DECREF(arrays);
                    Py_RETURN_NONE;
                }
            }
            PyObject *address = PyLong_FromVoidPtr(at);
            if (!address || PyList_Append(addresses, address))
                Py_CLEAR(addresses);
            Py_XDECREF(address);
        }
        Py_XDECREF(arrays);
    }
    return addresses;
}
