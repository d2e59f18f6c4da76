/* One client's dense layers, all of them in a call: the bytes that torch gives, whose library of
   products is called with the arguments that torch calls it with. What is between the products
   takes longer to launch than to do. */

#include <stddef.h>
#include <string.h>

/* A linear layer and what follows it. `weight` (row by row, [outputs, inputs]) and `bias` (-1:
   none) are places in a client's row; `values` and `deltas` are places in the buffer, of a batch's
   outputs and of their gradients before the activation, both [batch, outputs]. */
typedef struct {
    int inputs, outputs, relu;
    ptrdiff_t weight, bias, values, deltas;
} layer;

#define LAYERS_OF(TYPE)                                                                           \
    typedef void product_##TYPE(const char *, const char *, const int *, const int *, const int *, \
                                const TYPE *, const TYPE *, const int *, const TYPE *,            \
                                const int *, const TYPE *, TYPE *, const int *);                  \
    typedef void vector_product_##TYPE(const char *, const int *, const int *, const TYPE *,      \
                                       const TYPE *, const int *, const TYPE *, const int *,      \
                                       const TYPE *, TYPE *, const int *);                        \
                                                                                                  \
    /* Outputs of all layers for inputs x [batch, inputs]. */                                     \
    void forward_##TYPE(product_##TYPE *product, const layer *layers, int count, int batch,       \
                        const TYPE *row, const TYPE *x, TYPE *buffer)                             \
    {                                                                                             \
        const TYPE one = 1, zero = 0;                                                             \
        for (const layer *l = layers; l < layers + count; l++) {                                  \
            TYPE *outputs = buffer + l->values;                                                   \
            size_t size = (size_t)batch * (size_t)l->outputs;                                     \
            if (l->bias >= 0)                                                                     \
                for (int example = 0; example < batch; example++)                                 \
                    memcpy(outputs + (size_t)example * (size_t)l->outputs, row + l->bias,         \
                           (size_t)l->outputs * sizeof(TYPE));                                    \
            product("t", "n", &l->outputs, &batch, &l->inputs, &one, row + l->weight,             \
                    &l->inputs, x, &l->inputs, l->bias >= 0 ? &one : &zero, outputs,              \
                    &l->outputs);                                                                 \
            if (l->relu)                                                                          \
                for (size_t i = 0; i < size; i++)                                                 \
                    outputs[i] = outputs[i] < 0 ? 0 : outputs[i];                                 \
            x = outputs;                                                                          \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Gradients of all layers' outputs, from `delta` [batch, outputs] of what the last one gives;\
       and of the inputs, where `below` [batch, inputs] is given. */                              \
    void backward_##TYPE(product_##TYPE *product, const layer *layers, int count, int batch,      \
                         const TYPE *row, TYPE *buffer, const TYPE *delta, TYPE *below)           \
    {                                                                                             \
        const TYPE one = 1, zero = 0;                                                             \
        for (const layer *l = layers + count - 1; l >= layers; l--) {                             \
            TYPE *deltas = buffer + l->deltas;                                                    \
            const TYPE *values = buffer + l->values;                                              \
            size_t size = (size_t)batch * (size_t)l->outputs;                                     \
            if (l->relu)                                                                          \
                for (size_t i = 0; i < size; i++)                                                 \
                    deltas[i] = values[i] <= 0 ? 0 : delta[i];                                    \
            else if (delta != deltas)                                                             \
                memcpy(deltas, delta, size * sizeof(TYPE));                                       \
            TYPE *next = l > layers ? buffer + (l - 1)->deltas : below;                           \
            if (!next)                                                                            \
                break;                                                                            \
            product("n", "n", &l->inputs, &batch, &l->outputs, &one, row + l->weight, &l->inputs, \
                    deltas, &l->outputs, &zero, next, &l->inputs);                                \
            delta = next;                                                                         \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* What is left of a row, `old`, less a gradient times -`alpha`: into `row`, which may be     \
       `old`. `ones` has `batch` of them. */                                                      \
    void update_##TYPE(product_##TYPE *product, vector_product_##TYPE *vector_product,            \
                       const layer *layers, int count, int batch, const TYPE *old, TYPE *row,     \
                       const TYPE *x, const TYPE *buffer, const TYPE *ones, TYPE alpha)           \
    {                                                                                             \
        const TYPE one = 1;                                                                       \
        const int next = 1;                                                                       \
        for (const layer *l = layers; l < layers + count; l++) {                                  \
            const TYPE *deltas = buffer + l->deltas;                                              \
            if (old != row) {                                                                     \
                memcpy(row + l->weight, old + l->weight,                                          \
                       (size_t)l->inputs * (size_t)l->outputs * sizeof(TYPE));                    \
                if (l->bias >= 0)                                                                 \
                    memcpy(row + l->bias, old + l->bias, (size_t)l->outputs * sizeof(TYPE));      \
            }                                                                                     \
            product("n", "t", &l->inputs, &l->outputs, &batch, &alpha, x, &l->inputs, deltas,     \
                    &l->outputs, &one, row + l->weight, &l->inputs);                              \
            if (l->bias >= 0)                                                                     \
                vector_product("n", &l->outputs, &batch, &alpha, deltas, &l->outputs, ones,       \
                               &next, &one, row + l->bias, &next);                                \
            x = buffer + l->values;                                                               \
        }                                                                                         \
    }

LAYERS_OF(float)
LAYERS_OF(double)
