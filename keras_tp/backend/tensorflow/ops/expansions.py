"""Operations without a rule that DTensor cannot run or computes whole.

Names are TensorFlow's operation names, as in errors and graphs; `stateless_*`
are functions of `tf.random`. These operations are the limits of the backend.
The others have a rule in `ops.table`, or DTensor splits them.
"""

# Each raises an error with its name; DTensor's errors name the layer too.
REFUSED = {
    "DTensor has no expansion of a decomposition": (
        "Cholesky",
        "LogMatrixDeterminant",
        "Lu",
        "MatrixDeterminant",
        "MatrixInverse",
        "MatrixSolve",
        "MatrixTriangularSolve",
        "SelfAdjointEigV2",
        "Svd",
    ),
    "DTensor has no expansion of a change of an image's geometry": (
        "DepthToSpace",
        "ExtractImagePatches",
        "ImageProjectiveTransformV3",
        "MirrorPad",
        "ResizeBilinear",
        "ResizeNearestNeighbor",
        "SpaceToDepth",
    ),
    "DTensor has no layout for the lists of a loop": ("TensorListStack",),
    "DTensor has no expansion": (
        "Bucketize",
        "Cross",
        "Cumprod",
        "DenseBincount",
        "LowerBound",
        "Tile",
        "UnsortedSegmentMax",
    ),
    "the numbers would depend on the mesh": (
        "stateless_binomial",
        "stateless_gamma",
        "stateless_truncated_normal",
    ),
}

# Every device computes the whole operation, whatever is split.
WHOLE = {
    "needs all of a dim, and DTensor gathers the others with it": (
        "Cumsum",
        "TopKV2",
    ),
    "DTensor replicates what it has no expansion of its own for": (
        "Qr",
        "TensorScatterUpdate",
    ),
    "a convolution in groups, or of channels that come first": ("Conv2D",),
}
