"""Programs as Keras's guides and examples write them: nothing of a mesh.

Each function of `RECIPES` returns the numbers that a run shows: losses, metrics
and predictions.
"""

import keras
import numpy as np
from keras import layers
from keras import ops

BACKEND = keras.config.backend()


def _numbers(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def _integers(high, shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape).astype("int32")


def _fit(model, *args, **kwargs):
    kwargs = {"epochs": 2, "batch_size": 4, "shuffle": False, **kwargs}
    history = model.fit(*args, verbose=0, **kwargs).history
    return [value for name in sorted(history) for value in history[name]]


def _flat(*values):
    arrays = [ops.convert_to_numpy(v) for v in keras.tree.flatten(values)]
    return [float(x) for array in arrays for x in np.ravel(array)]


def feature_extraction():
    """A stack of layers, and a second model of its intermediate outputs."""
    first = keras.Sequential([keras.Input((12, 12, 3))])
    first.add(layers.Conv2D(8, 5, strides=2, activation="relu"))
    first.add(layers.Conv2D(8, 3, activation="relu", name="middle"))
    first.add(layers.GlobalMaxPooling2D())
    first.summary(print_fn=lambda *args: None)
    extractor = keras.Model(
        inputs=first.inputs, outputs=[layer.output for layer in first.layers]
    )
    middle = keras.Model(first.inputs, first.get_layer("middle").output)
    x = _numbers((4, 12, 12, 3))
    outputs = [ops.sum(y, axis=(0, -1)) for y in extractor(x)]
    return _flat(outputs, ops.mean(middle(x), axis=0))


def several_inputs_and_outputs():
    """The ticket ranking of the functional guide."""
    title = keras.Input((None,), name="title", dtype="int32")
    body = keras.Input((None,), name="body", dtype="int32")
    tags = keras.Input((4,), name="tags")
    x = layers.concatenate(
        [
            layers.LSTM(8)(layers.Embedding(30, 8)(title)),
            layers.LSTM(8)(layers.Embedding(30, 8)(body)),
            tags,
        ]
    )
    priority = layers.Dense(1, name="priority")(x)
    department = layers.Dense(4, name="department")(x)
    model = keras.Model([title, body, tags], [priority, department])
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(
                from_logits=True
            ),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"department": ["accuracy"]},
    )
    x = {
        "title": _integers(30, (8, 5)),
        "body": _integers(30, (8, 6), 1),
        "tags": _integers(2, (8, 4), 2).astype("float32"),
    }
    y = {
        "priority": _integers(2, (8, 1), 3).astype("float32"),
        "department": np.eye(4, dtype="float32")[_integers(4, (8,), 4)],
    }
    return _fit(model, x, y)


def residual_network():
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
    block = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(block)
    x = layers.BatchNormalization()(x)
    x = layers.add([x, block])
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dropout(0.0)(layers.Dense(16, activation="relu")(x))
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["acc"],
    )
    x, y = _numbers((8, 8, 8, 3)), _integers(4, (8,))
    return _fit(model, x, y, validation_split=0.5)


class Sampling(layers.Layer):
    """Shifts the mean by fixed noise, so that each mesh draws the same."""

    def call(self, inputs):
        mean, log_var = inputs
        noise = ops.cos(ops.arange(mean.shape[-1], dtype="float32") * 7)
        return mean + ops.exp(0.5 * log_var) * noise


class Encoder(layers.Layer):
    def __init__(self, latent=4, hidden=16, **kwargs):
        super().__init__(**kwargs)
        self.project = layers.Dense(hidden, activation="relu")
        self.mean = layers.Dense(latent)
        self.log_var = layers.Dense(latent)
        self.sampling = Sampling()

    def call(self, inputs):
        x = self.project(inputs)
        mean, log_var = self.mean(x), self.log_var(x)
        return mean, log_var, self.sampling((mean, log_var))


class Autoencoder(keras.Model):
    """The variational autoencoder of the guide to new layers."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = keras.Sequential(
            [
                layers.Dense(16, activation="relu"),
                layers.Dense(12, activation="sigmoid"),
            ]
        )

    def call(self, inputs):
        mean, log_var, z = self.encoder(inputs)
        loss = -0.5 * ops.mean(
            log_var - ops.square(mean) - ops.exp(log_var) + 1
        )
        self.add_loss(loss)
        return self.decoder(z)


def variational_autoencoder():
    model = Autoencoder()
    model.compile(keras.optimizers.Adam(1e-3), keras.losses.MeanSquaredError())
    x = _numbers((8, 12))
    return _fit(model, x, x) + _flat(model.predict(x, verbose=0)[:1])


class CustomFit(keras.Model):
    """A train step of one's own, as the guide for each backend writes it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]

    if BACKEND == "jax":

        def compute_loss_and_updates(self, trainable, other, x, y):
            y_pred, other = self.stateless_call(
                trainable, other, x, training=True
            )
            return self.loss_fn(y, y_pred), (y_pred, other)

        def train_step(self, state, data):
            import jax

            trainable, other, optimizer, metrics = state
            x, y = data
            (loss, (y_pred, other)), gradients = jax.value_and_grad(
                self.compute_loss_and_updates, has_aux=True
            )(trainable, other, x, y)
            trainable, optimizer = self.optimizer.stateless_apply(
                optimizer, gradients, trainable
            )
            logs, found = {}, []
            for metric in self.metrics:
                own = metrics[: len(metric.variables)]
                metrics = metrics[len(metric.variables) :]
                if metric.name == "loss":
                    own = metric.stateless_update_state(own, loss)
                else:
                    own = metric.stateless_update_state(own, y, y_pred)
                logs[metric.name] = metric.stateless_result(own)
                found += own
            return logs, (trainable, other, optimizer, found)

    elif BACKEND == "tensorflow":

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_fn(y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}

    else:

        def train_step(self, data):
            import torch

            x, y = data
            self.zero_grad()
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
            loss.backward()
            variables = list(self.trainable_weights)
            gradients = [v.value.grad for v in variables]
            with torch.no_grad():
                self.optimizer.apply(gradients, variables)
            self.loss_tracker.update_state(loss)
            self.mae_metric.update_state(y, y_pred)
            return {m.name: m.result() for m in self.metrics}


def custom_train_step():
    inputs = keras.Input((16,))
    x = layers.Dense(16, activation="relu")(inputs)
    model = CustomFit(inputs, layers.Dense(1)(x))
    model.compile(optimizer="adam")
    return _fit(model, _numbers((8, 16)), _numbers((8, 1), 1))


def transfer_learning():
    """A frozen base below a new head, then all of it with a small rate."""
    base = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.SeparableConv2D(8, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Conv2D(8, 3),
        ],
        name="base",
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 3))
    x = layers.Rescaling(scale=1 / 2.0, offset=-1)(inputs)
    x = base(x, training=False)
    x = layers.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, layers.Dense(1)(layers.Dropout(0.0)(x)))
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    x, y = _numbers((8, 8, 8, 3)), _integers(2, (8, 1))
    found = _fit(model, x, y)
    base.trainable = True
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return found + _fit(model, x, y)


class LossHistory(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        rate = float(ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.model.optimizer.learning_rate = rate * 0.5
        self.seen.append(float(np.sum(self.model.layers[-1].get_weights()[0])))


def callbacks():
    model = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    history = LossHistory()
    stop = keras.callbacks.EarlyStopping(
        monitor="val_loss", patience=1, restore_best_weights=True
    )
    plateau = keras.callbacks.ReduceLROnPlateau(patience=1)
    x, y = _numbers((8, 6)), _numbers((8, 1), 1)
    found = _fit(
        model,
        x,
        y,
        epochs=4,
        validation_data=(x, -y),
        callbacks=[history, stop, plateau, keras.callbacks.TerminateOnNaN()],
    )
    return found + history.seen + _flat(model.get_weights()[-1])


class TransformerBlock(layers.Layer):
    """Text classification with a transformer, as the example has it."""

    def __init__(self, dim, heads, hidden, rate=0.0):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=heads, key_dim=dim)
        self.ffn = keras.Sequential(
            [layers.Dense(hidden, activation="relu"), layers.Dense(dim)]
        )
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)

    def call(self, inputs):
        attended = self.dropout1(self.att(inputs, inputs))
        out1 = self.layernorm1(inputs + attended)
        return self.layernorm2(out1 + self.ffn(out1))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, length, vocabulary, dim):
        super().__init__()
        self.token_emb = layers.Embedding(vocabulary, dim)
        self.pos_emb = layers.Embedding(length, dim)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


def text_classification():
    inputs = layers.Input(shape=(10,))
    x = TokenAndPositionEmbedding(10, 50, 16)(inputs)
    x = TransformerBlock(16, 2, 32)(x)
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dense(20, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    model.compile(
        "sgd", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return _fit(model, _integers(50, (8, 10)), _integers(2, (8,), 1))


class CausalAttention(layers.Layer):
    """Heads split and merged by hand, with a mask made of positions."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.query = layers.Dense(dim)
        self.key = layers.Dense(dim)
        self.value = layers.Dense(dim)
        self.combine = layers.Dense(dim)

    def split(self, x):
        x = ops.reshape(x, (-1, ops.shape(x)[1], self.heads, self.size))
        return ops.transpose(x, axes=[0, 2, 1, 3])

    def call(self, x):
        length = ops.shape(x)[1]
        query = self.split(self.query(x))
        key, value = self.split(self.key(x)), self.split(self.value(x))
        score = ops.matmul(query, ops.transpose(key, axes=[0, 1, 3, 2]))
        score = score / ops.sqrt(ops.cast(self.size, "float32"))
        i = ops.arange(length)[:, None]
        mask = ops.cast(i >= ops.arange(length), score.dtype)
        score = score - 1e9 * (1 - mask)
        x = ops.matmul(ops.softmax(score, axis=-1), value)
        x = ops.transpose(x, axes=[0, 2, 1, 3])
        x = ops.reshape(x, (-1, length, self.heads * self.size))
        return self.combine(x)


def miniature_gpt():
    inputs = layers.Input(shape=(9,), dtype="int32")
    x = TokenAndPositionEmbedding(9, 40, 16)(inputs)
    x = x + CausalAttention(16, 4)(layers.LayerNormalization()(x))
    x = x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x))
    model = keras.Model(inputs=inputs, outputs=[layers.Dense(40)(x), x])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=[loss, None])
    ids = _integers(40, (8, 10))
    return _fit(model, ids[:, :-1], ids[:, 1:])


class Patches(layers.Layer):
    def __init__(self, size):
        super().__init__()
        self.patch_size = size

    def call(self, images):
        batch, height, width, channels = ops.shape(images)
        size = self.patch_size
        patches = ops.image.extract_patches(images, size=size)
        return ops.reshape(
            patches,
            (
                batch,
                (height // size) * (width // size),
                size * size * channels,
            ),
        )


class PatchEncoder(layers.Layer):
    def __init__(self, patches, dim):
        super().__init__()
        self.num_patches = patches
        self.projection = layers.Dense(units=dim)
        self.position = layers.Embedding(input_dim=patches, output_dim=dim)

    def call(self, patch):
        positions = ops.expand_dims(
            ops.arange(start=0, stop=self.num_patches, step=1), axis=0
        )
        return self.projection(patch) + self.position(positions)


def vision_transformer():
    inputs = keras.Input(shape=(8, 8, 3))
    normalization = layers.Normalization()
    normalization.adapt(_numbers((16, 8, 8, 3)))
    x = Patches(4)(normalization(inputs))
    x = PatchEncoder(4, 16)(x)
    x1 = layers.LayerNormalization(epsilon=1e-6)(x)
    attended = layers.MultiHeadAttention(num_heads=2, key_dim=16)(x1, x1)
    x2 = layers.Add()([attended, x])
    x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
    for units in (32, 16):
        x3 = layers.Dense(units, activation=keras.activations.gelu)(x3)
    x = layers.Flatten()(layers.Add()([x3, x2]))
    model = keras.Model(inputs, layers.Dense(4)(x))
    model.compile(
        keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2"),
        ],
    )
    return _fit(model, _numbers((8, 8, 8, 3)), _integers(4, (8,), 1))


def image_segmentation():
    """The U-Net like Xception of the segmentation example."""
    inputs = keras.Input(shape=(8, 8, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    previous = x = layers.Activation("relu")(x)
    for _ in range(2):
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(16, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    previous = layers.Conv2D(16, 1, strides=2, padding="same")(previous)
    previous = x = layers.add([x, previous])
    for filters in (16, 8):
        x = layers.Activation("relu")(x)
        x = layers.Conv2DTranspose(filters, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.UpSampling2D(2)(x)
        residual = layers.UpSampling2D(2)(previous)
        residual = layers.Conv2D(filters, 1, padding="same")(residual)
        previous = x = layers.add([x, residual])
    outputs = layers.Conv2D(3, 3, activation="softmax", padding="same")(x)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(1e-4), "categorical_crossentropy")
    # torch has no gradient of a sparse loss of images: not contiguous.
    y = np.eye(3, dtype="float32")[_integers(3, (4, 8, 8))]
    return _fit(model, _numbers((4, 8, 8, 3)), y)


def siamese_network():
    """Two towers that share weights, and a contrastive loss."""

    def euclidean_distance(vects):
        x, y = vects
        total = ops.sum(ops.square(x - y), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(total, keras.backend.epsilon()))

    def contrastive(y_true, y_pred):
        square, margin = (
            ops.square(y_pred),
            ops.square(ops.maximum(1 - y_pred, 0)),
        )
        return ops.mean((1 - y_true) * square + y_true * margin)

    inputs = keras.Input((8, 8, 1))
    x = layers.BatchNormalization()(inputs)
    x = layers.Conv2D(4, (3, 3), activation="tanh")(x)
    x = layers.AveragePooling2D(pool_size=(2, 2))(x)
    x = layers.BatchNormalization()(layers.Flatten()(x))
    tower = keras.Model(inputs, layers.Dense(8, activation="tanh")(x))
    first, second = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    merged = layers.Lambda(euclidean_distance, output_shape=(1,))(
        [tower(first), tower(second)]
    )
    merged = layers.BatchNormalization()(merged)
    output = layers.Dense(1, activation="sigmoid")(merged)
    model = keras.Model(inputs=[first, second], outputs=output)
    model.compile(loss=contrastive, optimizer="RMSprop", metrics=["accuracy"])
    pairs = [_numbers((8, 8, 8, 1)), _numbers((8, 8, 8, 1), 1)]
    return _fit(model, pairs, _integers(2, (8, 1)).astype("float32"))


class RecommenderNet(keras.Model):
    def __init__(self, users, movies, size, **kwargs):
        super().__init__(**kwargs)
        regularizer = keras.regularizers.l2(1e-6)
        self.user_embedding = layers.Embedding(
            users,
            size,
            embeddings_initializer="he_normal",
            embeddings_regularizer=regularizer,
        )
        self.user_bias = layers.Embedding(users, 1)
        self.movie_embedding = layers.Embedding(
            movies,
            size,
            embeddings_initializer="he_normal",
            embeddings_regularizer=regularizer,
        )
        self.movie_bias = layers.Embedding(movies, 1)

    def call(self, inputs):
        user_vector = self.user_embedding(inputs[:, 0])
        user_bias = self.user_bias(inputs[:, 0])
        movie_vector = self.movie_embedding(inputs[:, 1])
        movie_bias = self.movie_bias(inputs[:, 1])
        dot = ops.tensordot(user_vector, movie_vector, 2)
        return ops.nn.sigmoid(dot + user_bias + movie_bias)


def collaborative_filtering():
    model = RecommenderNet(20, 30, 8)
    model.compile(
        loss=keras.losses.BinaryCrossentropy(),
        optimizer=keras.optimizers.Adam(learning_rate=0.001),
    )
    x = np.stack([_integers(20, (8,)), _integers(30, (8,), 1)], axis=1)
    return _fit(model, x, np.linspace(0, 1, 8, dtype="float32")[:, None])


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher, self.student = teacher, student

    def compile(self, student_loss, distillation_loss, alpha, **kwargs):
        super().compile(**kwargs)
        self.student_loss_fn = student_loss
        self.distillation_loss_fn = distillation_loss
        self.alpha = alpha

    def compute_loss(
        self,
        x=None,
        y=None,
        y_pred=None,
        sample_weight=None,
        allow_empty=False,
    ):
        teacher = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher / 3.0, axis=1),
            ops.softmax(y_pred / 3.0, axis=1),
        ) * (3.0**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def knowledge_distillation():
    def network(filters, name):
        return keras.Sequential(
            [
                keras.Input(shape=(8, 8, 1)),
                layers.Conv2D(filters, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.MaxPooling2D(2, strides=1, padding="same"),
                layers.Flatten(),
                layers.Dense(4),
            ],
            name=name,
        )

    distiller = Distiller(network(4, "student"), network(8, "teacher"))
    distiller.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss=keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        ),
        distillation_loss=keras.losses.KLDivergence(),
        alpha=0.1,
    )
    return _fit(distiller, _numbers((8, 8, 8, 1)), _integers(4, (8,)))


class GraphConvolution(layers.Layer):
    """Messages of the neighbours of each node, summed by segments."""

    def __init__(self, units, edges, nodes):
        super().__init__()
        self.prepare = layers.Dense(units, activation="gelu")
        self.update = layers.Dense(units, activation="gelu")
        self.edges, self.nodes = edges, nodes

    def call(self, x):
        targets, sources = self.edges
        messages = self.prepare(ops.take(x, sources, axis=0))
        total = ops.segment_sum(messages, targets, num_segments=self.nodes)
        x = self.update(ops.concatenate([x, total], axis=1))
        return x / ops.sqrt(
            ops.maximum(ops.sum(x**2, axis=-1, keepdims=True), 1e-12)
        )


class NodeClassifier(keras.Model):
    def __init__(self, features, edges):
        super().__init__()
        self.features = ops.convert_to_tensor(features)
        self.conv = GraphConvolution(8, edges, len(features))
        self.logits = layers.Dense(3)

    def call(self, indices):
        x = self.conv(self.features)
        return self.logits(ops.take(x, ops.squeeze(indices, -1), axis=0))


def graph_network():
    model = NodeClassifier(
        _numbers((12, 6)), (_integers(12, (20,)), _integers(12, (20,), 1))
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return _fit(model, _integers(12, (8, 1), 2), _integers(3, (8,), 3))


def structured_data():
    """Numbers that are normalized, and categories that are looked up."""
    number = keras.Input((3,))
    category = keras.Input((1,), dtype="int32")
    normalization = layers.Normalization()
    normalization.adapt(_numbers((16, 3)))
    x = layers.concatenate(
        [
            normalization(number),
            layers.CategoryEncoding(6, output_mode="one_hot")(category),
            layers.Flatten()(layers.Embedding(6, 4)(category)),
        ]
    )
    wide, deep = x, layers.Dense(16, activation="relu")(x)
    deep = layers.BatchNormalization()(deep)
    x = layers.concatenate([wide, deep])
    model = keras.Model(
        [number, category], layers.Dense(1, activation="sigmoid")(x)
    )
    model.compile(
        "rmsprop", "binary_crossentropy", metrics=[keras.metrics.AUC()]
    )
    x = [_numbers((8, 3)), _integers(6, (8, 1), 1)]
    weights = {0: 1.0, 1: 2.0}
    return _fit(model, x, _integers(2, (8, 1), 2), class_weight=weights)


class OrthogonalRegularizer(keras.regularizers.Regularizer):
    def __init__(self, count, factor=0.001):
        self.num_features, self.l2reg = count, factor
        self.eye = ops.eye(count)

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.num_features, self.num_features))
        xxt = ops.tensordot(x, x, axes=(2, 2))
        xxt = ops.reshape(xxt, (-1, self.num_features, self.num_features))
        return ops.sum(self.l2reg * ops.square(xxt - self.eye))


def point_net():
    inputs = keras.Input((16, 3))
    x = layers.Activation("relu")(
        layers.BatchNormalization(momentum=0.0)(
            layers.Conv1D(8, kernel_size=1, padding="valid")(inputs)
        )
    )
    x = layers.GlobalMaxPooling1D()(x)
    x = layers.Dense(
        9,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(np.eye(3).flatten()),
        activity_regularizer=OrthogonalRegularizer(3),
    )(x)
    x = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(x)])
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1)(x))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy")
    return _fit(model, _numbers((8, 16, 3)), _integers(4, (8,)))


class Switch(layers.Layer):
    """A router that sends each token to its best expert."""

    def __init__(self, experts, units):
        super().__init__()
        self.router = layers.Dense(experts)
        self.experts = [layers.Dense(units) for _ in range(experts)]

    def call(self, x):
        gates = ops.softmax(self.router(x))
        best, index = ops.top_k(gates, k=1)
        chosen = ops.one_hot(index[..., 0], len(self.experts))
        self.add_loss(ops.mean(ops.mean(gates, 0) * ops.mean(chosen, 0)))
        outputs = ops.stack([expert(x) for expert in self.experts], axis=1)
        return best * ops.sum(chosen[..., None] * outputs, axis=1)


def switch_layer():
    model = keras.Sequential(
        [layers.Dense(8, "relu"), Switch(4, 8), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return _fit(model, _numbers((8, 6)), _numbers((8, 1), 1))


def super_resolution():
    inputs = keras.Input(shape=(6, 6, 1))
    x = inputs
    for filters in (16, 8, 4):
        x = layers.Conv2D(
            filters,
            3,
            padding="same",
            activation="relu",
            kernel_initializer="orthogonal",
        )(x)
    x = layers.Lambda(lambda x: ops.reshape(x, (-1, 6, 6, 2, 2, 1)))(x)
    x = layers.Permute((1, 3, 2, 4, 5))(x)
    model = keras.Model(inputs, layers.Reshape((12, 12, 1))(x))
    model.compile("adam", keras.losses.MeanSquaredError())
    return _fit(model, _numbers((4, 6, 6, 1)), _numbers((4, 12, 12, 1), 1))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return _numbers((4, 5, 6), index), _integers(2, (4, 1), index)


def sequence_classifier():
    """Recurrent layers, fed by a data set of one's own, then kept."""
    inputs = keras.Input((None, 6))
    x = layers.Bidirectional(layers.LSTM(8, return_sequences=True))(inputs)
    x = layers.Bidirectional(layers.GRU(8))(x)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(Batches(), epochs=2, verbose=0, shuffle=False).history
    scores = model.evaluate(Batches(), verbose=0)
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    x = _numbers((4, 5, 6), 9)
    same = ops.convert_to_numpy(copy(x)) - model.predict(x, verbose=0)
    assert np.abs(same).max() < 1e-5
    return _flat(history["loss"], scores, copy.predict_on_batch(x))


def options_of_training():
    """Accumulated, averaged, clipped, with steps that run several at once."""
    model = keras.Sequential([layers.Dense(16, "relu"), layers.Dense(1)])
    rate = keras.optimizers.schedules.CosineDecay(0.01, 10, warmup_steps=2)
    model.compile(
        keras.optimizers.Adam(
            rate, gradient_accumulation_steps=2, global_clipnorm=0.1
        ),
        "mse",
        steps_per_execution=1 if BACKEND == "torch" else 2,
    )
    return _fit(model, _numbers((16, 6)), _numbers((16, 1), 1))


def mixed_precision():
    keras.mixed_precision.set_dtype_policy("mixed_bfloat16")
    try:
        model = keras.Sequential(
            [layers.Dense(16, "relu"), layers.Dense(1, dtype="float32")]
        )
        model.compile("sgd", "mse")
        found = _fit(model, _numbers((8, 6)), _numbers((8, 1), 1))
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    # Sums of bfloat16 depend on how they are split.
    return [round(x, 2) for x in found]


def conv_autoencoder():
    inputs = layers.Input(shape=(8, 8, 1))
    x = layers.Conv2D(8, 3, activation="relu", padding="same")(inputs)
    x = layers.MaxPooling2D(2, padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(x)
    x = layers.Conv2D(1, 3, activation="sigmoid", padding="same")(x)
    model = keras.Model(inputs, x)
    model.compile(optimizer="adam", loss="binary_crossentropy")
    x = 1 / (1 + np.exp(-_numbers((8, 8, 8, 1))))
    return _fit(model, x, x) + _flat(model.predict(x[:2], verbose=0)[0, 0])


def data_augmentation():
    """Layers that change images in training only."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.RandomFlip("horizontal"),
            layers.RandomRotation(factor=0.1),
            layers.RandomZoom(0.2, 0.2),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    model.compile("sgd", "mse")
    x, y = _numbers((8, 8, 8, 3)), _numbers((8, 4), 1)
    scores = model.evaluate(x, y, batch_size=4, verbose=0)
    losses = _fit(model, x, y)
    assert np.isfinite(losses).all()
    return _flat(scores)


class SelfPaced(keras.Model):
    """Its own metrics, its own test step through `compute_loss`."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(8, activation="relu")
        self.head = layers.Dense(3)
        self.largest = keras.metrics.Mean(name="largest")

    def call(self, x, training=False):
        x = self.body(x)
        return self.head(x * 2 if training else x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(ops.max(ops.abs(y_pred), axis=-1))
        return {**results, "largest": self.largest.result()}


def own_metrics():
    model = SelfPaced()
    model.compile(
        "adam",
        keras.losses.CategoricalCrossentropy(
            from_logits=True, label_smoothing=0.1
        ),
        metrics=[keras.metrics.F1Score(average="macro")],
    )
    x = _numbers((8, 6))
    y = np.eye(3, dtype="float32")[_integers(3, (8,))]
    weights = np.linspace(0.5, 2, 8, dtype="float32")
    found = _fit(model, x, y, sample_weight=weights)
    return found + _flat(model.evaluate(x, y, batch_size=4, verbose=0))


RECIPES = {
    function.__name__: function
    for function in (
        feature_extraction,
        several_inputs_and_outputs,
        residual_network,
        variational_autoencoder,
        custom_train_step,
        transfer_learning,
        callbacks,
        text_classification,
        miniature_gpt,
        vision_transformer,
        image_segmentation,
        siamese_network,
        collaborative_filtering,
        knowledge_distillation,
        graph_network,
        structured_data,
        point_net,
        switch_layer,
        super_resolution,
        sequence_classifier,
        options_of_training,
        mixed_precision,
        conv_autoencoder,
        data_augmentation,
        own_metrics,
    )
}
